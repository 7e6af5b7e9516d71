"""The term `remote`: what it sends, what it reads, and that no answer that cannot be trusted becomes a score."""

import pytest

from rft.errors import Problems
from rft.reward.services.protocol import Rft
from tests.helpers import yaml_options
from tests.reward.reward_of import reward_of
from tests.reward.services.scripted_server import LIES, ScriptedServer, right

ROW = {"prompt": "p", "answer": "a", "extra": [1, {"b": None}]}
TEXTS = ["", "ab", "abc", "x y"]


@pytest.fixture
def serve():
    """Starts scripted servers; ends them after the test."""
    started = []

    def begin(*arguments, **options):
        started.append(ScriptedServer(*arguments, **options))
        return started[-1]

    yield begin
    for server in started:
        server.close()


def remote(addresses, call=None, **changes):
    node = yaml_options("reward/terms/remote.yaml")["remote"] | {"_target_": "rft.reward.services.remote.RemoteTerm"}
    node |= {"addresses": addresses, "call": {"failed": "drop_row", "deadline_s": 10.0, **(call or {})}, **changes}
    return reward_of({"remote": node}, "remote")


def score(reward, texts=TEXTS, row=ROW):
    term = reward._terms["remote"].caller.term
    if isinstance(term._protocol, Rft):
        term._protocol.fingerprint = "f"  # as the check of the servers finds it
    found = reward.score(texts, [row] * len(texts))
    reward.close()
    return found


def reasons(found):
    return [one.get("remote") for one in found.unscored]


def test_a_request_has_several_rows_and_its_answer_every_number(serve):
    server = serve()
    found = score(remote([server.address], rows_per_request=3))
    assert found.total.tolist() == [right(text) for text in TEXTS] and reasons(found) == [None] * 4
    assert found.numbers["remote/a"].tolist() == found.total.tolist()
    (path, first, _), (_, second, _) = sorted(server.requests, key=lambda one: -len(one[1]["rows"]))
    assert path == "/score" and first["responses"] == TEXTS[:3] and second["responses"] == TEXTS[3:]
    assert first["rows"] == [ROW] * 3 and first["id"] != second["id"]


def test_one_term_of_a_server_has_its_own_further_numbers(serve):
    found = score(remote([serve().address], term="a", fields=["answer"]))
    assert found.terms["remote"].tolist() == [right(text) for text in TEXTS]
    assert found.numbers.keys() == {"remote/letters"} and found.numbers["remote/letters"].tolist() == [0, 2, 3, 3]


def test_the_token_and_the_fields_are_sent_as_the_yaml_says(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve()
    score(remote([server.address], token="MY_KEY", fields=["answer"]), ["a"])
    ((_, body, authorization),) = server.requests
    assert authorization == "Bearer secret" and body["rows"] == [{"answer": "a"}]
    opened = ROW | {"prompt_opens": "<think>"}
    score(remote([server.address], token="MY_KEY", fields=["answer"]), ["a"], opened)
    assert server.requests[-1][1]["rows"] == [{"answer": ROW["answer"], "prompt_opens": "<think>"}]


@pytest.mark.parametrize("fault", [*LIES, "half_json", "no_http"])
def test_an_answer_that_cannot_be_trusted_is_no_score(serve, fault):
    server = serve(lambda number: fault)
    found = score(remote([server.address], term="a"))
    assert reasons(found) == ["bad_response"] * 4 and found.total.isnan().all()


@pytest.mark.parametrize(
    ("fault", "reason", "requests"),
    [
        ("cut", "unreachable", 2),
        ("die", "unreachable", 2),
        (500, "refused", 2),
        (503, "refused", 2),
        (422, "refused", 1),
    ],
)
def test_a_request_that_fails_is_repeated_if_time_may_cure_it(serve, fault, reason, requests, monkeypatch):
    monkeypatch.setattr("rft.reward.call.PAUSES_S", (0.0, 0.0))  # tests/reward/test_call.py measures them
    server = serve(lambda number: fault)
    found = score(remote([server.address], call={"tries": 2}))
    assert reasons(found) == [reason] * 4 and len(server.requests) == requests


def test_a_server_that_hangs_is_unscored_at_the_deadline_and_the_next_try_asks_another(serve, monkeypatch):
    monkeypatch.setattr("rft.reward.call.PAUSES_S", (0.0, 0.0))
    hanging, other = serve(lambda number: "hang"), serve()
    found = score(remote([hanging.address], call={"deadline_s": 0.2}))
    assert reasons(found) == ["deadline"] * 4
    both = remote([hanging.address, other.address], call={"deadline_s": 0.2, "tries": 2, "concurrency": 1})
    assert score(both).total.tolist() == [right(text) for text in TEXTS]


def test_a_request_goes_to_another_server_at_once(serve):
    broken, other = serve(lambda number: "nan"), serve()
    found = score(remote(["http://127.0.0.1:9", broken.address, other.address], rows_per_request=1))
    assert found.total.tolist() == [right(text) for text in TEXTS] and 1 <= len(broken.requests) <= 4


def test_a_server_that_fails_too_often_gets_no_requests(serve):
    server = serve(lambda number: 500)
    breaker = {"failures": 2, "pause_s": 60.0}
    found = score(remote([server.address], call={"concurrency": 1}, rows_per_request=1, breaker=breaker))
    assert sorted(reasons(found)) == ["circuit_open", "circuit_open", "refused", "refused"]
    assert len(server.requests) == 2


def test_a_response_without_a_score_keeps_the_reason_of_the_server(serve):
    def answer(body):
        unscored = {"total": None, "terms": {}, "unscored": {"a": "deadline"}, "numbers": {}}
        return {"id": body["id"], "fingerprint": "f", "count": 1, "results": [unscored]}

    server = serve(answer=answer)
    assert reasons(score(remote([server.address]), ["x"])) == ["a deadline"]
    assert reasons(score(remote([server.address], term="a"), ["x"])) == ["deadline"]
    assert reasons(score(remote([server.address], term="b"), ["x"])) == ["no_score"]


def test_openrlhf_gets_queries_and_answers_rewards_with_further_numbers(serve):
    def answer(body):
        values = [right(query) for query in body["query"]]
        return {"rewards": values, "scores": values, "extra_logs": {"half": [value / 2 for value in values]}}

    server = serve(answer=answer)
    found = score(remote([server.address], protocol="openrlhf"))
    assert found.total.tolist() == [right("p" + text) for text in TEXTS]
    assert found.numbers["remote/half"].tolist() == [right("p" + text) / 2 for text in TEXTS]
    path, body, _ = server.requests[0]
    assert path == "/get_reward" and body["labels"] == ["a"] * 4 and body["prompts"] == ["p"] * 4


@pytest.mark.parametrize("rewards", [[1.0], [1.0, None], [1.0, True], "12", [1.0, "2"], [[1.0], [2.0]]])
def test_openrlhf_without_a_number_for_each_query_is_no_score(serve, rewards):
    server = serve(answer=lambda body: {"rewards": rewards})
    assert reasons(score(remote([server.address], protocol="openrlhf"), ["x", "y"])) == ["bad_response"] * 2


def test_nemo_gym_gets_a_response_and_answers_a_reward_or_masks_the_sample(serve):
    def answer(body):
        text = body["response"]["output"][0]["content"][0]["text"]
        masked = {"mask_sample": True, "failure_kind": "judge_error", "reward": 0.0}
        return body | ({"reward": right(text)} if text else masked)

    server = serve(answer=answer)
    found = score(remote([server.address], protocol="nemo_gym", rows_per_request=1))
    assert found.total[1:].tolist() == [right(text) for text in TEXTS[1:]]
    assert reasons(found) == ["judge_error", None, None, None]
    path, body, _ = server.requests[0]
    assert path == "/verify" and body["answer"] == "a" and "prompt" not in body
    assert body["responses_create_params"] == {"input": [{"role": "user", "content": "p"}]}


def test_a_mapping_fills_the_request_and_finds_the_score(serve):
    request = {
        "text": "{response}",
        "gold": {"is": "{row.answer}", "extra": "{row.extra}"},
        "n": 1,
        "q": "Q: {row.prompt}!",
    }
    server = serve(answer=lambda body: {"data": [{"score": right(body["text"])}]})
    changes = {"protocol": "mapping", "path": "/grade", "request": request, "score": "data.0.score"}
    found = score(remote([server.address], rows_per_request=1, **changes))
    assert found.total.tolist() == [right(text) for text in TEXTS]
    path, body, _ = next(one for one in server.requests if one[1]["text"] == "ab")
    gold = {"is": "a", "extra": [1, {"b": None}]}
    assert path == "/grade" and body == {"text": "ab", "gold": gold, "n": 1, "q": "Q: p!"}
    for place in ("data.1.score", "data.0.other", "data.score", "data.0"):
        wrong = remote([server.address], rows_per_request=1, **changes | {"score": place})
        assert reasons(score(wrong, ["x"])) == ["bad_response"], place


def test_servers_are_asked_before_the_run(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    good, guarded = serve(), serve(token="secret")
    remote([good.address, "http://127.0.0.1:9"], term="a").check()
    remote([guarded.address], token="MY_KEY").check()
    remote([good.address], protocol="openrlhf").check()
    reward = remote([good.address])
    reward.check()
    assert reward.score(["a"], [ROW]).total.tolist() == [right("a")]
    other = serve()
    other.terms["a"] = "g"
    remote([good.address, other.address]).check()
    with pytest.raises(Problems, match=r"addresses: .*\[0\].* and .*\[1\].* have other options; start them with the"):
        remote([good.address, other.address], term="a").check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"addresses": ["http://127.0.0.1:9"]},
            r"addresses\[0\]=http://127.0.0.1:9: GET /health: .* start one, or corr",
        ),
        ({"term": "b"}, r"addresses: reward.*has no term 'b', but a; start it with"),
        ({"rows_per_request": 65}, r"rows_per_request=65: reward.* takes 64"),
        ({"token": "NO_SUCH_KEY"}, r"token=NO_SUCH_KEY: there is no such environment variable"),
        ({"guarded": True}, r"token=null: .*status 401: .*another token.*; name the variable with the server's token"),
    ],
)
def test_a_server_that_cannot_score_is_named_before_the_run(serve, changes, message):
    changes = dict(changes)
    server = serve(token="secret" if changes.pop("guarded", False) else None)
    with pytest.raises(Problems, match=rf"^reward\.terms\.remote\.{message}"):
        remote(**{"addresses": [server.address], **changes}).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": []}, r"addresses is empty: give the address"),
        ({"addresses": ["localhost:1"]}, r"addresses\[0\]: localhost:1 is not a URL"),
        ({"protocol": "openrlhf", "term": "a"}, r"term=a: only servers of protocol=rft have terms; remove it"),
        (
            {"protocol": "nemo_gym"},
            r"rows_per_request=16: a request of protocol=nemo_gym has one response",
        ),
        ({"protocol": "mapping", "path": "/x"}, r"request is null: protocol=mapping needs it"),
        ({"protocol": "mapping", "request": {}, "score": "a"}, r"path=None: give the path of the requests"),
        ({"score": "a"}, r"score: only protocol=mapping reads it"),
        ({"protocol": "openrlhf", "fields": ["answer"]}, r"fields: the request needs the field 'prompt'; add it"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=rf"^reward\.terms\.remote\.{message}"):
        remote(**{"addresses": ["http://127.0.0.1:9"], **changes})


def test_a_field_that_is_no_json_is_named(serve):
    reward = remote([serve().address])
    reward.check_row(ROW)
    for value in (b"bytes", float("nan")):
        with pytest.raises(ValueError, match=r"^the field 'extra' is no JSON .*reward\.terms\.remote\.fields"):
            reward.check_row(ROW | {"extra": value})
    remote([serve().address], fields=["answer"]).check_row(ROW | {"extra": b"bytes"})
