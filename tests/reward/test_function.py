"""Functions without registration: how a signature is recognised, what is passed, and what is refused."""

import pytest
import torch

from rft.reward.function import BatchFunction, RowFunction, function_term, load_function
from tests.reward import user_functions
from tests.reward.reward_of import reward_of

FILE = user_functions.__file__
ROWS = [
    {"prompt": "1+1=", "answer": "2", "data_source": "sums", "extra_info": {"index": 0}},
    {"prompt": "2+2=", "answer": "4", "data_source": "more", "extra_info": {"index": 1}},
]


def term_of(name, **options):
    return function_term({"function": f"{FILE}:{name}", **options}, "reward.terms.a")


def reward_for(name, call=None, **options):
    node = {"function": f"{FILE}:{name}", "weight": 1.0, "call": call or {}, **options}
    return reward_of({"a": node}, "a")


@pytest.mark.parametrize("name", ["ours", "compute_score", "compute_scores", "trl", "trl_async", "openrlhf"])
def test_every_signature_gets_the_response_and_its_answer(name):
    found = reward_for(name).score(["2", "5"], ROWS)
    assert found.total.tolist() == [1.0, 0.0] and found.unscored == [{}, {}]


def test_the_signature_decides_what_one_call_scores():
    kinds = {name: type(term_of(name)) for name in ("ours", "compute_score", "compute_scores", "trl", "openrlhf")}
    assert kinds == {
        "ours": RowFunction,
        "compute_score": RowFunction,
        "compute_scores": BatchFunction,
        "trl": BatchFunction,
        "openrlhf": BatchFunction,
    }


def test_a_module_and_a_file_name_the_same_function():
    by_module = load_function("tests.reward.user_functions:ours", "k")
    assert by_module("2", ROWS[0]) == load_function(f"{FILE}:ours", "k")("2", ROWS[0]) == 1.0


def test_numbers_beside_the_score_are_kept_and_texts_are_not():
    found = reward_for("compute_score").score(["2", "55"], ROWS)
    assert found.terms["a"].tolist() == [1.0, 0.0]
    assert {name: column.tolist() for name, column in found.numbers.items()} == {"a/length": [1, 2], "a/index": [0, 1]}
    found = reward_for("openrlhf").score(["2", "5"], ROWS)
    assert found.numbers["a/twice"].tolist() == [2.0, 0.0]


def test_verl_reads_the_ground_truth_of_its_own_data_format():
    row = {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"index": 0}}
    assert term_of("compute_score").value("7", row)["score"] == 1.0
    with pytest.raises(ValueError, match="neither a field 'reward_model' with a 'ground_truth' nor a field 'answer'"):
        reward_for("compute_score").check_row({"prompt": "p"})


def test_trl_gets_columns_and_chats_and_may_leave_a_response_unscored():
    user_functions.CALLS.clear()
    chat = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    module = "tests.reward.user_functions:trl"
    reward = reward_of({"a": {"function": module, "weight": 1.0, "call": {"failed": "drop_row"}}}, "a")
    assert reward.fields == ("answer", "prompt")
    found = reward.score(["2", ""], [row | {"prompt": p} for row, p in zip(ROWS, chat, strict=True)])
    assert found.total[0] == 1.0 and found.total[1].isnan() and found.unscored == [{}, {"a": "none"}]
    prompts, completions, answers, others = user_functions.CALLS[0]
    assert prompts == chat and answers == ["2", "4"]
    assert completions == [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": ""}]]
    assert others["data_source"] == ["sums", "more"], "every field that all rows have is a column"


def test_functions_see_the_thought_that_a_prompt_opens():
    rows = [ROWS[0] | {"prompt_opens": "<think>"}, ROWS[1]]
    user_functions.CALLS.clear()
    reward_of({"a": {"function": "tests.reward.user_functions:trl", "weight": 1.0}}, "a").score(["2", "2"], rows)
    assert user_functions.CALLS[0][3]["prompt_opens"] == ["<think>", None], "a column, also where some rows lack it"
    assert term_of("of_the_thought").values(["2", "2"], rows) == [1.0, 0.0]


def test_openrlhf_gets_the_contents_of_a_chat_as_text():
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "label": "x"}
    assert term_of("openrlhf").values(["x"], [row])[0]["score"] == 1.0


def test_options_are_arguments_of_the_function():
    found = reward_for("ours_with_options", bonus=0.5, scale=2.0).score(["2", "5"], ROWS)
    assert found.total.tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"function": "no_colon"}, r"^reward\.terms\.a\.function=no_colon: write it as path/to/file\.py:name"),
        (
            {"function": "/nowhere.py:f"},
            r"^reward\.terms\.a\.function=/nowhere\.py:f: .*cannot be imported.*No such file",
        ),
        ({"function": "no_module:f"}, r"^reward\.terms\.a\.function=no_module:f: .*No module named"),
        ({"function": f"{FILE}:our"}, r"has no function 'our'; did you mean ours\?"),
        ({"function": f"{FILE}:strange"}, r"parameters \(text, gold\) are of no known signature; write one of"),
        ({"function": f"{FILE}:needs_ids"}, r"this version passes no 'completion_ids'; give the parameter a default"),
        ({"function": f"{FILE}:ours_with_options"}, r"the parameter 'bonus' gets no value; add `bonus: <value>`"),
        ({"function": f"{FILE}:ours", "bonus": 1}, r"^reward\.terms\.a\.bonus: .*ours has no such parameter"),
        ({"function": f"{FILE}:ours", "row": 1}, r"^reward\.terms\.a\.row: the run passes this parameter itself"),
    ],
)
def test_what_cannot_be_called_is_refused_by_key(node, message):
    with pytest.raises(ValueError, match=message):
        reward_of({"a": {"weight": 1.0, **node}}, "a")


def test_a_file_that_fails_names_the_error(tmp_path):
    (tmp_path / "bad.py").write_text("import os\nraise RuntimeError('at the top')\n")
    with pytest.raises(ValueError, match=r"bad\.py cannot be imported \(RuntimeError: at the top\)"):
        load_function(f"{tmp_path / 'bad.py'}:f", "k")


def test_tensors_of_one_column_are_scores():
    from rft.reward.function import spread

    assert spread(torch.tensor([[1.0], [2.0]])) == [1.0, 2.0]
