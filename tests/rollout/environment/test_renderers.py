"""Renderers of the package `renderers`, on small tokenizers with the special tokens and the templates of the models."""

import random

import pytest
from tokenizers import AddedToken

pytest.importorskip("renderers")

from rft.data.encode.encoder import Encoder
from rft.data.tool_calls import ToolCall
from rft.rollout.answers import uncut
from rft.rollout.environment import options
from rft.rollout.environment.dialogue import Dialogue
from rft.rollout.environment.renderers import PackageRenderer, check_renderer, renderer_of
from rft.rollout.environment.turn_template import TurnTemplate
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import SCHEMA, TOOL, said, tokenizer, user
from tests.rollout.environment import trl_templates as trl
from tests.rollout.environment.play.environments import Shop
from tests.rollout.environment.scripted import OPTIONS
from tests.rollout.environment.test_dialogue import calling, completion, run

QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
        "</tool_response>", "<think>", "</think>")  # fmt: skip
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
GLM = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
       "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip
# By the name of a template of TRL: a renderer, and the tokens of the model that the template does not name.
KNOWN = {
    "qwen3": ("qwen3", QWEN),
    "qwen3_instruct_2507": ("qwen3", QWEN),
    "qwen3_5_think": ("qwen3.5", (*QWEN, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")),
    "llama3_1": ("llama-3", LLAMA),
    "glm4moe": ("glm-4.5", GLM),
    "nemotron_3_nano": ("nemotron-3", QWEN),
}
GEMMA = ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>", "<|image>", "<|image|>",
         "<image|>")  # fmt: skip
TURNS = 10


def encoder(name, tokens=None, **arguments):
    made = trl.tokenizer.__wrapped__(name)
    more = KNOWN[name][1] if tokens is None else tokens
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in more])
    if name.startswith("llama"):
        made.bos_token = "<|begin_of_text|>"
    return Encoder(made, "chat", None, arguments=arguments)


def qwen3(**arguments):
    """An encoder with the template of Qwen3, without TRL."""
    made = tokenizer(chats.QWEN3)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN])
    return Encoder(made, "chat", None, arguments=arguments)


def both(encode, name, tools=((SCHEMA,),)):
    """A checked renderer, the template that asks it, and one without it."""
    found = renderer_of(name, encode.chat)
    found.check(encode, [list(some) for some in tools])
    return found, TurnTemplate(encode, found), TurnTemplate(encode)


def written(encode, text, end):
    """An answer that the template would write, with a thought where the prompt has begun one."""
    return encode.encode([text])[0] + ([] if end is None else [encode.chat.tokenizer.convert_tokens_to_ids(end)])


@trl.needs_trl
@pytest.mark.parametrize("name", KNOWN)
def test_ten_turns_with_calls_are_one_row_of_the_templates_text(name):
    encode = encoder(name)
    found, template, bridge = both(encode, KNOWN[name][0])
    dialogue, order, asked = Dialogue(template, [user("What is 2+2?")], [SCHEMA]), random.Random(0), []
    [end] = [end for end in ("<|im_end|>", "<|eot_id|>", "<|observation|>") if end in encode.chat.added.values()]
    original = found.suffix
    found.suffix = lambda *given: asked.append(original(*given)) or asked[-1]
    turns = []
    for number in range(TURNS):
        thought = "<think>\nI add.\n</think>\n\n" if "<think>" in KNOWN[name][1] else ""
        ids = written(encode, f"{thought}{order.random()}", end)
        turns.append((completion(ids), calling(number), [TOOL | {"content": f"result {number}"}]))
    run(dialogue, turns)  # compares every sampled token with the rows
    assert dialogue.forks == [] and len(dialogue.rows) == 1 and None not in asked and len(asked) == TURNS
    other = Dialogue(bridge, [user("What is 2+2?")], [SCHEMA])
    run(other, turns)
    assert other.prompt == dialogue.prompt and other.forks == []


@trl.needs_trl
@pytest.mark.parametrize("name", KNOWN)
def test_no_sampled_token_changes_whatever_was_sampled(name):
    """Ten turns of random tokens, each cut or ended, with messages of the user and results of tools."""
    encode = encoder(name)
    found, template, _ = both(encode, KNOWN[name][0])
    order, size, ends = random.Random(0), len(encode.chat.tokenizer), found._renderer.get_stop_token_ids()
    for _ in range(20):
        turns = []
        for number in range(TURNS):
            ids, end = [order.randrange(size) for _ in range(5)], order.choice([None, *ends])
            message, following = order.choice([(said("x"), [user("y")]), (calling(number), [TOOL])])
            turns.append((completion(ids if end is None else [*ids, end], end is not None), message, following))
        run(Dialogue(template, [user("What is 2+2?")], [SCHEMA]), turns)


@trl.needs_trl
def test_an_answer_that_was_cut_is_closed_where_the_bridge_forks():
    encode = encoder("glm4moe")
    _, template, bridge = both(encode, "glm-4.5")
    turn = (completion(encode.encode(["<think>\nI ad"])[0], ended=False), calling(1), [TOOL])
    dialogue, other = (Dialogue(one, [user("2+2?")], [SCHEMA]) for one in (template, bridge))
    run(dialogue, [turn])
    run(other, [turn])
    assert dialogue.forks == [] and other.forks == ["the answer has no end token"]
    assert encode.decode(dialogue.prompt).endswith(
        "<think>\nI ad</think><|endoftext|><|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>"
    )


def test_a_thought_that_was_cut_is_closed():
    encode = qwen3()
    _, template, bridge = both(encode, "qwen3")
    prompt = template.opening([user("2+2?")], [SCHEMA])
    answer = encode.encode(["<think>\nI ad"])[0]
    found = template.continuation(prompt + answer, len(prompt), [TOOL], None, [SCHEMA])
    close = encode.chat.tokenizer.convert_tokens_to_ids("</think>")
    assert found == [close, *bridge.suffix([TOOL], None, [SCHEMA])]


def test_the_bridge_answers_where_the_renderer_does_not():
    """The renderer of Qwen3 has no suffix for a question after a thought: the template would drop the thought."""
    encode = qwen3()
    found, template, bridge = both(encode, "qwen3")
    prompt = template.opening([user("2+2?")])
    answer = written(encode, "<think>\nI add.\n</think>\n\n4", "<|im_end|>")
    given = list(prompt), list(answer)
    assert found.suffix(*given, [user("And 3+3?")], None) is None
    assert template.continuation(prompt + answer, len(prompt), [user("And 3+3?")], answer[-1]) == bridge.suffix(
        [user("And 3+3?")], answer[-1]
    )
    # an end token in the middle of an answer: the renderer would drop what stands behind it
    middle = [*answer, *encode.encode(["more"])[0]]
    assert found.suffix(given[0], middle, [TOOL], None) is None
    text = encode.decode(template.continuation(prompt + middle, len(prompt), [TOOL], None))
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")
    # a thought that the answer ended in
    inside = written(encode, "<think>\nI ad", "<|im_end|>")
    assert found.suffix(given[0], inside, [TOOL], None) is None


def test_arguments_of_the_template_are_those_of_the_renderer():
    encode = qwen3(enable_thinking=False)
    found, template, bridge = both(encode, "qwen3")
    prompt = template.opening([user("2+2?")])
    answer = written(encode, "4", "<|im_end|>")
    expected = bridge.suffix([user("And 3+3?")], answer[-1])
    assert found.suffix(list(prompt), list(answer), [user("And 3+3?")], None) == expected
    assert encode.decode(expected).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ValueError, match=r"^environment\.renderer=llama-3: the renderer llama-3 cannot") as error:
        renderer_of("llama-3", encode.chat)
    assert "enable_thinking" in str(error.value) and "data.template_arguments" in str(error.value)


def test_auto_is_the_renderer_of_exactly_this_model():
    encode = qwen3()
    assert renderer_of("auto", encode.chat) is None, "the package has none for this path"
    encode.chat.tokenizer.name_or_path = "Qwen/Qwen3-8B"
    found = renderer_of("auto", encode.chat)
    found.check(encode, [])
    assert type(found._renderer).__name__ == "Qwen3Renderer"


def test_a_renderer_is_known_by_the_names_of_the_package():
    for name in ("auto", "qwen3", "gpt-oss", "llama-3"):
        check_renderer(name)
    with pytest.raises(ValueError, match=r"^environment\.renderer=qwen-3: the package renderers .*did you mean"):
        check_renderer("qwen-3")
    for name in ("default", "custom"):
        with pytest.raises(ValueError, match=rf"^environment\.renderer={name}: .*known: .*qwen3, "):
            check_renderer(name)


def test_a_tokenizer_without_the_tokens_is_refused():
    with pytest.raises(ValueError, match=r"^environment\.renderer=llama-3: .*\(Special token '<\|begin_of_text\|>'"):
        renderer_of("llama-3", qwen3().chat)


def test_another_template_is_refused():
    """Its opening differs, or only what stands behind an answer."""
    encode = qwen3()
    tail = encode.chat.tokenizer.chat_template
    other = Encoder(encode.chat.tokenizer, "chat", None, arguments={"enable_thinking": False})
    with pytest.raises(ValueError, match=r"^environment\.renderer=qwen3 is no renderer of data") as error:
        renderer_of("qwen3", encode.chat).check(other, [])
    assert "its token" in str(error.value) and "that of the template '<think>'" in str(error.value)
    encode.chat.tokenizer.chat_template = tail.replace("</tool_response>", "</tool_response> ")
    with pytest.raises(ValueError, match=r"the result of a tool behind an answer that was cut"):
        renderer_of("qwen3", encode.chat).check(encode, [])
    encode.chat.tokenizer.chat_template = tail.replace("<tools>", "<tools> ")
    renderer_of("qwen3", encode.chat).check(encode, [])
    with pytest.raises(ValueError, match=r"\(user, with tools\) its token"):
        renderer_of("qwen3", encode.chat).check(encode, [[SCHEMA]])


@trl.needs_trl
def test_a_template_with_the_date_of_today_needs_its_argument():
    for given in ({}, {"date_string": "1 Jan 2026"}):
        encode = encoder("llama3_2", LLAMA, **given)
        if given:
            renderer_of("llama-3", encode.chat).check(encode, [[SCHEMA]])
            continue
        with pytest.raises(ValueError, match=r"^environment\.renderer=llama-3 is no renderer.*template_arguments"):
            renderer_of("llama-3", encode.chat).check(encode, [])


def test_the_options_of_a_run_choose_it():
    encode = qwen3()
    node = {"shop": {"_target_": f"{Shop.__module__}.Shop"}}
    for name, used in ((None, False), ("auto", False), ("qwen3", True)):
        made = options.Environments.of(options.EnvironmentOptions(classes=node, **{**OPTIONS, "renderer": name}))
        made.check(encode)
        assert isinstance(made.template(encode)._renderer, PackageRenderer) == used
    with pytest.raises(ValueError, match=r"^environment\.renderer=qwen33"):
        options.Environments.of(options.EnvironmentOptions(classes=node, **{**OPTIONS, "renderer": "qwen33"}))
    made = options.Environments.of(options.EnvironmentOptions(classes=node, **{**OPTIONS, "renderer": "qwen3"}))
    with pytest.raises(ValueError, match=r"^environment\.renderer=qwen3: the renderer qwen3 cannot be built"):
        made.check(Encoder(tokenizer(chats.QWEN25), "chat", None))


@trl.needs_trl
def test_calls_in_a_form_that_no_format_has_are_read_by_the_package():
    """Those of Gemma 4. Its templates before the fifth version write null as None, which does not come back."""
    encode = encoder("gemma4_v5", GEMMA)
    node = {"shop": {"_target_": f"{Shop.__module__}.Shop"}}
    given = {**OPTIONS, "tool_format": "auto", "classes": node, "renderer": "gemma4"}
    environments = options.Environments.of(options.EnvironmentOptions(**given))
    environments.check(encode)
    reader = environments.call_format(encode)
    price = '<|tool_call>call:price{item:<|"|>tea <tool_call|<|"|>}<tool_call|>'
    prompt = encode.prompt(
        {"prompt": [user("What is 2+2?")], "tools": list(environments.classes["shop"].tools.values())}
    )

    def read(text):
        answer = uncut(completion(encode.encode([text])[0]))
        return reader.read(prompt, answer, environments.classes["shop"].tools, ())

    assert read(f"So. {price}<|tool_response>").calls == [ToolCall("price", {"item": "tea <tool_call|"})]
    assert read("It is 4.<turn|>") == ("It is 4.", "It is 4.", [])
    [reason] = read('<|tool_call>call:price{item:<|"|>te').calls
    assert reason.startswith("the call cannot be read (")
    older = encoder("gemma4_v4", GEMMA)
    for encoded, renderer in ((encode, None), (older, "gemma4")):
        with pytest.raises(
            ValueError, match=r"^environment\.tool_format=auto: .* in a form that no format reads; .*renderer"
        ):
            options.Environments.of(options.EnvironmentOptions(**given | {"renderer": renderer})).check(encoded)
