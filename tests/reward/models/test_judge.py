"""A language model as a judge: its soft score is that of a plain forward, what it writes is read as it should be."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rft.reward.models.grade import Grade
from tests.reward.models.test_scalar import RESPONSES, ROWS, save
from tests.reward.reward_of import reward_of

QUESTION = {"text": "{prompt}={response}+", "words": ["1", "0"]}
PATTERN = "([0-9])[^0-9]*$"


def node(folder, kind="Judge", **changes):
    target = {"_target_": f"rft.reward.models.judge.{kind}", "weight": 1.0, "path": str(folder), "question": QUESTION}
    how = {
        "template": "none",
        "template_arguments": {},
        "system": None,
        "micro_batch_tokens": 16,
        "dtype": "float32",
        "trust_remote_code": False,
    }
    return target | how | changes


def writing(folder, **changes):
    grade = {"pattern": PATTERN, "unparsed": -1.0} | changes.pop("grade", {})
    return node(folder, "WritingJudge", grade=grade, max_new_tokens=8, **changes)


def scores(options):
    reward = reward_of({"judge": options}, accuracy="judge")
    reward.check()
    reward.place(torch.device("cpu"))
    return reward.score(RESPONSES, ROWS).total


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Folder, model and tokenizer of a language model that knows nothing."""
    folder = tmp_path_factory.mktemp("judge")
    return folder, *save(folder, AutoModelForCausalLM)


def asked(tokenizer):
    texts = [f"{row['prompt']}={response}+" for row, response in zip(ROWS, RESPONSES, strict=True)]
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


@pytest.mark.parametrize(("kind", "cap"), [("qwen3", 1), ("qwen3", 24), ("qwen3", 10**6), ("gpt2", 10**6)])
def test_the_score_is_the_odds_of_the_two_words_whatever_shares_a_forward(kind, cap, tmp_path):
    model, tokenizer = save(tmp_path, AutoModelForCausalLM, model_type=kind)  # one tells places by distance, one counts
    good, bad = tokenizer.convert_tokens_to_ids(["1", "0"])
    with torch.no_grad():
        said = [model(input_ids=ids).logits[0, -1].double().softmax(0) for ids in asked(tokenizer)]
    expected = torch.stack([chances[good] / (chances[good] + chances[bad]) for chances in said])
    assert expected.std() > 0.02
    found = scores(node(tmp_path, micro_batch_tokens=cap))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_what_it_writes_is_what_transformers_writes_greedily(judge):
    folder, model, tokenizer = judge
    expected = []
    for ids in asked(tokenizer):
        with torch.no_grad():
            for _ in range(8):
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        written = tokenizer.decode(ids[0, -8:]).partition("<eos>")[0]
        expected.append(Grade(PATTERN, -1.0, ["1", "0"], "grade")(written.replace("<pad>", "").replace("<unk>", "")))
    assert len({*expected}) > 1
    for cap in (1, 10**6):
        assert scores(writing(folder, micro_batch_tokens=cap)).tolist() == expected


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Is it? Verdict: no. Or, Verdict: Yes", 1.0),
        ("**VERDICT:** NO", 0.0),
        ("verdict: 7.5 of 10", 7.5),
        ("Yes", -1.0),
        ("verdict: maybe", -1.0),
        (f"verdict: {'9' * 400}", -1.0),  # no finite number
        ("", -1.0),
    ],
)
def test_grade(text, score):
    assert Grade(r"(?i)verdict:\W*(\w+(?:\.\d+)?)", -1.0, ["Yes", "No"], "grade")(text) == score


def test_it_reads_what_its_question_asks_for(judge):
    text = QUESTION | {"text": "{answer} {response}"}
    assert reward_of({"judge": node(judge[0], question=text)}, "judge").fields == ("answer",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            node("", question=QUESTION | {"words": ["1", "10"]}),
            r"question\.words: '10' is 2 tokens to the token",
        ),
        (node("", question=QUESTION | {"words": ["1", "Y"]}), r"question\.words: 'Y' is unknown to the tokenizer of"),
        (node("", question=QUESTION | {"text": "{prompt}"}), r"question\.text='{prompt}': it needs {response}"),
        (node("", question=QUESTION | {"text": "{a}{b}"}), r"question\.text compares {a} and {b}"),
        (node("", question={"text": "{response}"}), r"question\.words is missing"),
        (writing("", grade={"pattern": "("}), r"grade\.pattern: '\(' is not a regular expression"),
        (writing("", grade={"pattern": "Yes"}), r"grade\.pattern: 'Yes' needs one group"),
    ],
)
def test_what_cannot_be_is_refused_by_name(judge, options, message):
    with pytest.raises(ValueError, match=rf"^reward\.terms\.judge\.{message}"):
        scores(options | {"path": str(judge[0])})


def test_a_path_without_a_language_model_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^reward\.terms\.judge\.path: no model can be read from '.*nothing'"):
        scores(node(tmp_path / "nothing"))
    save(tmp_path, AutoModelForSequenceClassification)
    with pytest.raises(
        ValueError, match=r"^reward\.terms\.judge\.path=.*: Qwen3ForSequenceClassification is not a lan"
    ):
        scores(writing(tmp_path))


@pytest.mark.parametrize(("make", "written"), [(node, 0), (writing, 8)])
def test_no_forward_has_more_tokens_than_the_option_says(judge, make, written):
    tokens = []  # of each forward, and those that are generated from it

    def look(module, inputs):
        if isinstance(module, nn.Embedding):
            if inputs[0].shape[1] > 1:
                tokens.append(0)
            tokens[-1] += inputs[0].numel()

    longest = max(ids.shape[1] for ids in asked(judge[2])) + written
    hook = register_module_forward_pre_hook(look)
    try:
        for cap, together in [(longest, False), (2 * longest, False), (4 * longest, True)]:
            tokens.clear()
            scores(make(judge[0], micro_batch_tokens=cap))
            assert max(tokens) <= cap and (len(tokens) == 1) == together
    finally:
        hook.remove()
