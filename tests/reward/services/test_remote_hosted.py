"""`call.workers=http`: the term stays in the run, and a server of the same term computes its values."""

import pytest

from rft.errors import Problems
from tests.reward.reward_of import reward_of
from tests.reward.serving.served import KEY, served

CALL = {"failed": "drop_row"}
TERMS = {
    "rule": {"name": "gsm8k", "weight": 1.0, "method": "flexible", "markers": ["####"], "call": CALL},
    "even": {"function": "tests.reward.user_functions:of_even_length", "weight": 0.5, "call": CALL},
}
TEXTS = [f"it is {number}" for number in range(40)]
ROWS = [{"answer": f"#### {number - number % 3}"} for number in range(40)]


HTTP = {"workers": "http", "deadline_s": 1.0}


def hosted(address, terms=TERMS):
    http = {"addresses": [address], "token": "SERVED_KEY", "rows_per_request": 7}
    call = CALL | {"workers": "http", "http": http, "deadline_s": 20.0}
    return reward_of({name: node | {"call": call} for name, node in terms.items()}, "rule")


@pytest.fixture(autouse=True)
def key_of_the_server(monkeypatch):
    monkeypatch.setenv("SERVED_KEY", KEY)


def same(one, other):
    one, other = ([scores.total, *scores.terms.values(), *scores.numbers.values()] for scores in (one, other))
    return len(one) == len(other) and all(
        a.nan_to_num(-7.0).tolist() == b.nan_to_num(-7.0).tolist() for a, b in zip(one, other, strict=True)
    )


def test_a_server_gives_the_scores_numbers_and_reasons_of_this_process():
    inline = reward_of(TERMS, "rule").score(TEXTS, ROWS)
    assert 0 < sum(map(bool, inline.unscored)) < 40 and inline.numbers
    with served(TERMS, "rule") as address:
        reward = hosted(address)
        reward.check()
        found = reward.score(TEXTS, ROWS)
        assert reward.extract(TEXTS[:1], ROWS[:1]) == ["0"], "answers are extracted in this process"
        reward.close()
    assert same(found, inline) and found.unscored == inline.unscored


def test_a_server_reads_thoughts_as_this_process_does():
    texts = ["#### 5</think>#### 3", "#### 3", "<think>#### 3", "#### 3"]
    rows = [{"answer": "3", "prompt_opens": "<think>"}] * 2 + [{"answer": "3"}] * 2
    terms = {"rule": TERMS["rule"] | {"prompt_opens": None}}
    with served(terms, "rule") as address:
        found = hosted(address, terms)
        found.check()
        assert found.score(texts, rows).total.tolist() == [1.0, 0.0, 0.0, 1.0]
        assert reward_of(terms, "rule").score(texts, rows).total.tolist() == [1.0, 0.0, 0.0, 1.0]
        assert found.extract(texts, rows) == ["3", None, None, "3"]
        found.close()
        for other in ({"prompt_opens": True}, {"reasoning": []}):
            with pytest.raises(Problems, match=r"^reward\.terms\.rule\.call\.http\.addresses: the servers have other"):
                hosted(address, {"rule": TERMS["rule"] | other}).check()


def test_a_server_reads_the_beginning_of_an_answer_as_this_process_does():
    begun = {"role": "assistant", "content": "#### 1"}
    rows = [{"answer": "13", "prompt": [{"role": "user", "content": "10+3?"}, begun]}]
    terms = {"rule": TERMS["rule"] | {"include_prefill": True}}
    with served(terms, "rule") as address:
        found = hosted(address, terms)
        found.check()
        assert found.score(["3"], rows).total.tolist() == [1.0] and found.extract(["3"], rows) == ["13"]
        found.close()
        with pytest.raises(Problems, match=r"^reward\.terms\.rule\.call\.http\.addresses: the servers have other"):
            hosted(address).check()


def test_a_server_with_other_options_is_refused():
    other = {name: node | {"weight": 3.0} for name, node in TERMS.items()}
    with served(other, "rule") as address:
        hosted(address).check()  # the weight is no option of the term
        changed = TERMS | {"rule": TERMS["rule"] | {"markers": ["is"]}}
        with pytest.raises(Problems, match=r"^reward\.terms\.rule\.call\.http\.addresses: the servers have other"):
            hosted(address, changed).check()
        with pytest.raises(Problems, match=r"^reward\.terms\.other\.call\.http\.addresses: .* has no term 'other'"):
            hosted(address, TERMS | {"other": TERMS["rule"]}).check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"workers": "http", "deadline_s": 1.0}, r"call\.http\.addresses is empty: give the address of a server"),
        ({"workers": "http"}, r"call\.workers=http needs a deadline, .* set reward\.terms\.rule\.call\.deadline_s"),
        ({"http": {"addresses": ["http://here:1"]}}, r"call\.http: only call\.workers=http reads it"),
        (HTTP | {"http": {"addresses": ["here:1"]}}, r"call\.http\.addresses\[0\]: here:1 is not a URL"),
        (HTTP | {"http": {"breaker": {"failures": 0}}}, r"call\.http\.breaker"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=rf"^reward\.terms\.rule\.{message}"):
        reward_of({"rule": TERMS["rule"] | {"call": call}}, "rule")
