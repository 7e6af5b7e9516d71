"""A server of reward terms over real HTTP: what it answers to each protocol, and what it refuses."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rft.remote.http_client import httpx
from tests.conftest import SOON_S
from tests.reward.serving.served import GO, KEY, SIZES, STARTED, ask, served

USER = "tests.reward.user_functions"
DROP = {"failed": "drop_row"}
TERMS = {
    "right": {"function": f"{USER}:ours", "weight": 1.0, "call": DROP},
    "even": {"function": f"{USER}:of_even_length", "weight": 0.5, "call": DROP},
}
ROW = {"answer": "ab"}


@pytest.fixture(scope="module")
def address():
    with served(TERMS, "right") as address:
        yield address


def test_a_batch_has_every_term_number_and_reason(address):
    body = {"id": "me", "responses": ["ab", "abc", "xy"], "rows": [ROW] * 3}
    status, answer = ask(f"{address}/score", body)
    assert status == 200 and answer["id"] == "me" and answer["count"] == 3
    numbers = {"even/length": 2.0}
    even = pytest.approx(0.2)
    assert answer["results"] == [
        {"total": pytest.approx(1.1), "terms": {"right": 1.0, "even": even}, "unscored": {}, "numbers": numbers},
        {"total": None, "terms": {"right": 0.0}, "unscored": {"even": "ValueError"}, "numbers": {}},
        {"total": pytest.approx(0.1), "terms": {"right": 0.0, "even": even}, "unscored": {}, "numbers": numbers},
    ]
    status, empty = ask(f"{address}/score", {"responses": [], "rows": []})
    assert status == 200 and (empty["id"], empty["count"], empty["results"]) == (None, 0, [])


def test_halves_of_characters_in_a_request_are_replaced(address):
    body = {"id": "\ud800", "responses": ["a\udc00"], "rows": [{"answer": "a\udc00"}]}
    status, answer = ask(f"{address}/score", body)
    assert status == 200 and answer["id"] == "�" and answer["results"][0]["terms"]["right"] == 1.0


def test_an_answer_has_the_fingerprint_of_what_was_asked_for(address):
    health = ask(f"{address}/health")[1]
    body = {"responses": ["ab"], "rows": [ROW]}
    for term, mark in ((None, health["sum"]), *health["terms"].items()):
        assert ask(f"{address}/score", body | {"term": term})[1]["fingerprint"] == mark
    assert len({health["sum"], *health["terms"].values()}) == 3


def test_health_names_the_terms_and_metrics_count(address):
    status, health = ask(f"{address}/health")
    assert status == 200 and health["ready"] is True and set(health["terms"]) == {"right", "even"}
    ask(f"{address}/score", {"responses": ["a"], "rows": [ROW]})
    _, text = ask(f"{address}/metrics")
    assert 'rft_reward_unscored_total{term="even",reason="ValueError"}' in text
    assert 'rft_reward_requests_total{path="/score",status="200"}' in text and "rft_reward_in_flight 0" in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0 for line in lines)


def test_openrlhf_gets_rewards_scores_and_logs(address):
    body = {"query": ["pab", "pxy"], "prompts": ["p", "p"], "labels": ["ab", "ab"]}
    status, answer = ask(f"{address}/get_reward", body)
    assert status == 200 and answer["rewards"] == pytest.approx([1.1, 0.1]) and answer["scores"] == [1.0, 0.0]
    assert answer["extra_logs"] == {"right": [1.0, 0.0], "even": pytest.approx([0.2, 0.2])}
    assert ask(f"{address}/get_reward", body | {"query": ["pab", "pxyz"]}) == (
        500,
        {"detail": "response 1 has no score (even: ValueError)"},
    )
    assert ask(f"{address}/get_reward", body | {"query": ["pab", "qxy"]})[0] == 422
    assert ask(f"{address}/get_reward", {"query": ["ab"], "labels": ["ab"]})[1]["scores"] == [1.0]


def test_nemo_gym_gets_its_request_with_a_reward(address):
    message = {"type": "message", "content": [{"type": "output_text", "text": text} for text in "ab"]}
    response = {"output": [{"type": "reasoning", "summary": []}, message]}
    body = {"responses_create_params": {"input": []}, "response": response, "verifier_metadata": ROW}
    status, answer = ask(f"{address}/verify", body)
    assert status == 200 and answer["reward"] == pytest.approx(1.1) and answer["right"] == 1.0
    assert answer["response"] == response and answer["verifier_metadata"] == ROW
    message["content"].pop()
    assert ask(f"{address}/verify", body) == (500, {"detail": "response 0 has no score (even: ValueError)"})


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/score", b"{", 422, "the body is not JSON"),
        ("/score", b'{"responses": [NaN]}', 422, "the body is not JSON: NaN is no number"),
        ("/score", b"\xff", 422, "the body is not JSON: 'utf-8' codec can't decode"),
        ("/score", b"[" * 100_000, 422, "the body is not JSON"),
        ("/score", [1], 422, "the body is an object, not list"),
        ("/score", {"responses": "a", "rows": [ROW]}, 422, "responses: expected a list"),
        ("/score", {"responses": [1], "rows": [ROW]}, 422, "responses[0]: expected a text, got 1"),
        (
            "/score",
            {"responses": ["a"], "rows": [ROW], "term": "b"},
            422,
            "term: there is no term 'b', but right",
        ),
        ("/score", {"responses": ["a"], "rows": [ROW], "term": [1]}, 422, "term: there is no term [1]"),
        ("/score", {"responses": ["a"], "rows": []}, 422, "rows: expected 1 entries, got 0"),
        ("/score", {"responses": ["a"], "rows": [1]}, 422, "rows[0]: expected an object"),
        ("/score", {"responses": ["a"] * 65, "rows": [ROW] * 65}, 413, "65 responses; a request may have 64"),
        ("/score", b" " * (2**20 + 1), 413, "a request may have 1 MiB"),
        ("/verify", {"response": {}}, 422, "responses_create_params: expected an object"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(address, path, body, status, said):
    found, answer = ask(address + path, body)
    assert found == status and said in answer["detail"]


def test_a_row_without_a_field_is_named():
    rule = {"name": "gsm8k", "weight": 1.0, "method": "flexible", "markers": ["####"]}
    with served({"a": rule}, "a") as address:
        status, answer = ask(f"{address}/score", {"responses": ["1", "1"], "rows": [{"answer": "#### 1"}, {}]})
    said = "row 1: the row has no field 'answer', which reward.terms.a reads"
    assert (status, answer) == (422, {"detail": said})


def test_every_path_needs_the_token(address):
    body = {"responses": ["ab"], "rows": [ROW]}
    for path, sent in (("/health", None), ("/metrics", None), ("/score", body), ("/get_reward", body), ("/no", None)):
        for token in (None, "", "wrong", "sécret".encode().decode("latin1")):
            assert ask(f"{address}{path}", sent, token=token)[0] == 401
    assert ask(f"{address}/score", body)[0] == ask(f"{address}/health")[0] == 200


def test_a_client_that_sets_no_header_sends_the_token_as_the_password_of_the_address(address):
    with httpx.Client() as client:
        named = address.replace("//", "//run:{}@")
        statuses = [client.get(named.format(token) + "/health").status_code for token in (KEY, "wrong", "")]
    assert statuses == [200, 401, 401]
    assert [ask(f"{address}/health", token=text, scheme="Basic")[0] for text in ("secret", "=", "c2VjcmV0")] == [
        401
    ] * 3
    assert ask(f"{address}/health", scheme="Digest")[0] == 401


def test_requests_that_wait_are_scored_together_and_too_many_are_refused():
    terms = {"slow": {"function": "tests.reward.serving.served:waits", "weight": 1.0, "call": DROP}}
    with served(terms, "slow", limits={"requests": 3}) as address, ThreadPoolExecutor(8) as threads:
        body = {"responses": ["a", "b"], "rows": [{"prompt": "p"}] * 2}
        first = threads.submit(ask, f"{address}/score", body)
        assert STARTED.wait(SOON_S)
        others = [threads.submit(ask, f"{address}/score", body) for _ in range(5)]
        while sum(other.done() for other in others) < 3:
            time.sleep(0.005)
        assert ask(f"{address}/health")[0] == 200, "the event loop answers while a term computes"
        GO.set()
        found = sorted(future.result()[0] for future in [first, *others])
    assert found == [200, 200, 200, 503, 503, 503]
    assert SIZES == [2, 4]
