"""A text that continues another one begins without the blank that a tokenizer of SentencePiece's kind writes first."""

from itertools import product

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rft.data.encode.base import RichText
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.rollout.environment.turn_template import TurnTemplate
from rft.rollout.forced_stop import ForcedStop

LINES = [
    "Answer: Yes", "Answer: No, 2+2=4", "the answer is 4", "Yes or no", "so it is =Yes", "2+2=4 and 4+4=8", "u: a Yes"
]  # fmt: skip
KINDS = [*product(("unigram", "bpe"), ("always", "first", "never")), ("bpe", "normalizer"), ("bytes", "always")]
BLANKS = {
    "always": (" ", " "),
    "normalizer": (" ", " "),
    "first": (" ", ""),
    "never": ("", ""),
}  # first, behind a special token
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]


def tokenizer(kind, scheme, normalizer=None):
    """A tokenizer of this model that was trained on LINES, and writes a blank by this scheme."""
    model = {"unigram": models.Unigram, "bpe": lambda: models.BPE(unk_token="<unk>"), "bytes": models.BPE}[kind]()
    made = Tokenizer(model)
    if kind == "bytes":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    elif scheme == "normalizer":  # as in the files of Llama 2
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    options = {"vocab_size": 90, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(unk_token="<unk>", initial_alphabet=["\n"], **options)
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else ["\n"]
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options | {"vocab_size": 90 + len(alphabet)})
    made.train_from_iterator(LINES, trainer)
    if normalizer is not None:
        made.normalizer = normalizer
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=["<|end|>"], **special)


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def own(request):
    """A tokenizer, and the blanks that it writes at the beginning of a text and behind a special token."""
    return tokenizer(*request.param), *BLANKS[request.param[1]]


def spelled(made, ids):
    """What tokens spell, to the blank; decoders leave out the first one."""
    return "".join(made.convert_ids_to_tokens(list(ids))).replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")


@pytest.mark.parametrize(
    ("prompt", "response"),
    [("Answer: ", "Yes"), ("2+2=", "4"), ("Answer:", " Yes"), ("the ans", "wer is 4"), ("so it is ", "no, =Yes\n4")],
)
def test_a_response_behind_a_prompt_spells_the_text(prompt, response, own):
    """Where the tokens of the prompt begin those of the whole text, and where they do not."""
    made, first, _ = own
    encoder = Encoder(made, "none", None)
    ids, trains = encoder.example({"prompt": prompt, "response": response})
    head = encoder.prompt({"prompt": prompt})
    assert ids[: len(head)] == head and trains == [False] * len(head) + [True] * (len(ids) - len(head))
    assert spelled(made, ids) == f"{first}{prompt}{response}</s>"
    assert spelled(made, ids[len(head) :]) == f"{response}</s>"


def test_every_cut_of_a_text_spells_it(own):
    made, first, _ = own
    encoder = Encoder(made, "none", None)
    for line in LINES:
        for cut in range(1, len(line)):
            ids, _ = encoder.example({"prompt": line[:cut], "response": line[cut:]})
            assert spelled(made, ids) == f"{first}{line}</s>", line[:cut]


@pytest.mark.parametrize("train_on", ["response", "assistant", "last"])
def test_a_conversation_spells_what_the_template_writes(train_on, own):
    """A turn begins behind a blank, in the middle of a word: the tokens of the prompt end otherwise."""
    made, first, behind = own
    made.chat_template = TEMPLATE
    encoder = Encoder(made, "chat", None, train_on=train_on)
    turns = [("user", "2+2="), ("assistant", "Yes"), ("user", "so it is"), ("assistant", "Answer")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids, trains = encoder.example({"prompt": messages[:1], "response": messages[1:]})
    assert spelled(made, ids) == f"{first}u: 2+2=a: Yes</s>{behind}u: so it isa: Answer</s>"
    shown = ["Yes</s>", "Answer</s>"][train_on == "last" :]
    assert spelled(made, [token for token, train in zip(ids, trains, strict=True) if train]) == "".join(shown)


@pytest.mark.parametrize("text", ["Yes", " Yes", "4", "=Yes", "\nso", "Yes<|end|>no", "<|end|>Yes"])
def test_phrases_observations_and_steps_spell_their_text(text, own):
    """Behind a special token they begin as the tokenizer begins a text there."""
    made, _, blank = own
    encoder, end = Encoder(made, "none", None), made.convert_tokens_to_ids("<|end|>")
    found = [
        encoder.encode([text])[0],
        ForcedStop((0.2, 0.4), text).encode(encoder),
        TurnTemplate(encoder).suffix([{"role": "user", "content": text}], None),
        TurnTemplate(encoder).suffix([{"role": "user", "content": text}], made.convert_tokens_to_ids("4")),
        encoder.steps({"prompt": "2+2="}, [text], text)[0][-len(encoder.encode([text])[0]) :],
    ]
    assert {spelled(made, ids) for ids in found} == {text.replace("<|end|>", f"<|end|>{blank}")}
    whole = made(f"a<|end|>{text}", add_special_tokens=False).input_ids
    behind = TurnTemplate(encoder).suffix([{"role": "user", "content": text}], end)
    assert behind == whole[-len(behind) :] and whole[-len(behind) - 1] == end


@pytest.mark.parametrize("made", [tokenizer("bpe", "never"), characters(alphabet="Answer: Yo24+=")])
def test_a_tokenizer_without_a_leading_blank_reads_each_text_once_as_it_is(made, monkeypatch):
    encoder, seen = Encoder(made, "none", None), []
    whole = encoder.tokenize
    monkeypatch.setattr(encoder.continued, "_tokenize", lambda texts: seen.append(texts) or whole(texts))
    assert encoder.encode(["Yes", "2+2="]) == made(["Yes", "2+2="], add_special_tokens=False).input_ids
    assert seen == [[RichText("Yes"), RichText("2+2=")]]


def test_a_neutral_text_that_is_dropped_or_merges_gives_way_to_the_next():
    """Here a line break is stripped, and `=Yes` is a token."""
    own = tokenizer("bpe", "first", normalizers.Replace(Regex(r"^\s+"), ""))
    assert "=Yes" in own.get_vocab() and own("\n", add_special_tokens=False).input_ids == []
    encoder = Encoder(own, "none", None)
    assert spelled(own, encoder.encode(["Yes"])[0]) == "Yes"
    assert spelled(own, encoder.encode(["=Yes"])[0]) == "=Yes"
