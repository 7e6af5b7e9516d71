"""The chat templates that TRL ships: what its masks train, what transformers continues, where scores are read."""

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rft.actor.actor import Actor
from rft.actor.base import ModelContext
from rft.actor.model import write_export
from rft.data.encode.base import Messages
from rft.data.encode.encoder import Encoder
from rft.distributed import start
from tests.data.encode.test_masks import CALLING, THINKING, TWO, said, trained, user
from tests.helpers import MODEL, actor_options, make_strategy, same, token_batch
from tests.reward.models.test_scalar import node
from tests.reward.reward_of import reward_of
from tests.rollout.environment import trl_templates as trl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from chat_page import PAGE, page

pytestmark = trl.needs_trl
TRAINING = [name for name in trl.NAMES if name.endswith("_training")]
ASKED = [user("What is 2+2?")]
CHATS = {"one": TWO[:2], "two": TWO, "thought": [TWO[0], THINKING[1]], "thoughts": THINKING, "call": CALLING}


def rendered(name: str, messages: Messages, **options: Any) -> Any:
    """What transformers makes of messages; templates that take parts alone get them."""
    if name in trl.NO_TEXT:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    return trl.tokenizer(name).apply_chat_template(messages, **options)


@pytest.mark.parametrize("name", trl.NAMES)
def test_a_begun_answer_is_continued_as_transformers_continues_it(name):
    begun = [*ASKED, said("It is")]
    encoder = Encoder(trl.tokenizer(name), "chat", None)
    text = rendered(name, begun, continue_final_message=True, tokenize=False)
    assert encoder.decode(encoder.prompt({"prompt": begun})) == text


@pytest.fixture(scope="module")
def scorer():
    """A reward model that trains, with a token for every one of each template; a padding token is the same in all."""
    tokenizer = max((trl.tokenizer(name) for name in trl.NAMES), key=len)
    context = ModelContext("actor", world := start("cpu"), make_strategy(world), tokenizer, 0)
    shape = MODEL | {"max_position_embeddings": 2048, "initializer_range": 0.3}
    return Actor(context, actor_options(head="score", model_config=shape))


@pytest.mark.parametrize("name", trl.NAMES)
def test_a_score_is_read_at_the_token_that_was_trained(name, scorer, tmp_path):
    """In training, by the reward term of a run, and by transformers alone from the exported folder and the text."""
    tokenizer, row = trl.tokenizer(name), {"prompt": ASKED, "response": "It is 4."}
    encoder = Encoder(tokenizer, "chat", None, scored=True)
    ids, trains = encoder.example(row)
    assert ids[-1] == encoder.end and trains[-1]
    flags = [torch.tensor(trains)]
    scored = scorer.compute(token_batch(ids, response_mask=flags, loss_mask=flags), ("score",), 1.0)["score"][0]
    assert scored.nonzero().flatten().tolist() == [len(ids) - 1]

    weights, plain = scorer.export_weights(), scorer.plain_model()
    write_export(weights, tmp_path, plain, None, tokenizer, "score", None, encoder.ends, torch.float32)
    reward = reward_of({"model": node(tmp_path, template="chat")}, accuracy="model")
    reward.place(torch.device("cpu"))
    same(reward.score([row["response"]], [row]).terms["model"], scored[-1:], 1e-3)

    text = rendered(name, ASKED, add_generation_prompt=True, tokenize=False) + row["response"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    inputs = AutoTokenizer.from_pretrained(tmp_path)(text, return_tensors="pt")
    assert inputs.input_ids[0].tolist() == ids
    with torch.no_grad():
        same(model(**inputs).logits[0], scored[-1:], 1e-3)


def test_turns_that_call_tools_end_with_the_tokens_that_the_vendors_name():
    """Those of the models' own generation configs, beside the end of a plain answer."""
    found = {name: trl.tokenizer(name).convert_ids_to_tokens(trl.encoder(name).ends[1:]) for name in trl.NAMES}
    gemma = ["diffusion_gemma", "diffusion_gemma_training", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"]
    assert {name: ends for name, ends in found.items() if ends} == {
        "glm4moe": ["<|observation|>"],
        "glm4moe_training": ["<|observation|>"],
        "gptoss": ["<|call|>"],
        "gptoss_training": ["<|call|>"],
        **{name: ["<|tool_response>"] for name in gemma},
    }


def test_whatever_answers_are_trained_to_end_with_ends_a_text():
    for name in trl.NAMES:
        encoder = Encoder(trl.tokenizer(name), "chat", None)
        for messages in CHATS.values():
            try:
                turns = trained(encoder, {"response": messages})
            except ValueError:  # see below
                continue
            ends = tuple(trl.tokenizer(name).convert_ids_to_tokens(encoder.ends))
            assert all(turn.endswith(ends) for turn in turns), name


def runs(name: str, messages: Messages) -> list[str]:
    """What TRL trains in a conversation: the runs of its mask as texts."""
    made = rendered(name, messages, return_dict=True, return_assistant_tokens_mask=True)
    found: list[list[int]] = [[]]
    for token, flag in zip(made["input_ids"], made["assistant_masks"], strict=True):
        found += [[]] if found[-1] and not flag else []
        found[-1] += [token] if flag else []
    return [trl.tokenizer(name).decode(run) for run in found if run]


def compared(name: str, messages: Messages) -> str:
    """What trains with a template here, and with the variant of it that TRL trains with.

    Returns:
        "equal"; "within": the same turns, where TRL also trains the generation prompt, or what the template writes
        behind the end token; "fewer": the same without turns that the template rewrites; "refused" here, "impossible"
        in both; or "other".
    """
    encoder = Encoder(trl.tokenizer(name.removesuffix("_training")), "chat", None)
    encoder.answers = Counter()
    try:
        of_trl = runs(name, messages)
    except (TemplateError, TypeError):  # of the template
        of_trl = []
    try:
        of_rft = trained(encoder, {"response": messages})
    except ValueError:
        return "refused" if of_trl else "impossible"
    around = [text.partition(turn) for turn, text in zip(of_rft[::-1], of_trl[::-1], strict=False)]
    if not all(turn and not end.replace("<eos>", "").strip() for _, turn, end in around):
        return "other"
    if len(of_rft) != len(of_trl):
        return "fewer" if len(of_trl) - len(of_rft) == encoder.answers["rewritten"] else "other"
    return "equal" if of_rft == of_trl else "within"


def test_what_trains_is_what_trl_trains_or_differs_for_a_reason():
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in TRAINING:
        for chat, messages in CHATS.items():
            found[compared(name, messages)][name.removesuffix("_training")].add(chat)
    assert {kind: sum(map(len, names.values())) for kind, names in found.items()} == {
        "equal": 16,
        "within": 84,
        "fewer": 15,
        "impossible": 5,
        "refused": 30,
        "other": 5,
    }
    nemotron = {name: {"one", "two", "call"} for name in found["refused"] if name.startswith("nemotron_3")}
    assert len(nemotron) == 4  # an answer without the thought that the prompt begins; see `data.template_arguments`
    without_calls = ("idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")
    assert found["refused"] == nemotron | {name: {"call"} for name in without_calls} | {  # the template leaves it out
        "deepseek_r1_distill": set(CHATS),  # as well; and the prompt begins thoughts, which the template drops
        "deepseekv3": {"one", "two", "thought", "thoughts"},  # as well
        "qwen3_5_nothink": {"thought", "thoughts"},  # the prompt has an empty thought
    }
    # a second end token behind the first; and a turn that goes on behind a result, where its header is not written
    assert found["other"] == {"cohere2": {"one", "two", "thought", "thoughts"}, "diffusion_gemma": {"call"}}


def test_the_page_of_chats_is_current():
    assert PAGE.read_text() == page(), "run: python scripts/chat_page.py"
