"""Agents over real HTTP: clients, keys, and every way in which an agent ends."""

import threading
import time

import openai
import pytest

from rft.remote.http_limits import HttpLimits
from rft.rollout.environment.gateway import server, session
from rft.rollout.environment.turn_template import TurnTemplate
from tests.conftest import SOON_S, alive
from tests.rollout.environment.gateway import agents
from tests.rollout.environment.gateway.agents import TOOLS, ask, fetch, user
from tests.rollout.environment.scripted import play

EOS = "<eos>"
CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'


def node(agent, module=__name__, **options):
    return {"agent": {"_target_": f"{module}.{agent}", **options}}


async def a_client_of_openai(data, base_url, api_key):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    assert [model.id for model in (await client.models.list()).data] == ["policy"]
    messages = [{"role": "system", "content": "S"}, user("Q")]
    found = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.3)
    [call] = found.choices[0].message.tool_calls
    assert found.choices[0].finish_reason == "tool_calls" and call.function.arguments == '{"item": "tea"}'
    messages += [found.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    found = await client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert [token.token for token in found.choices[0].logprobs.content] == ["e", "n", "d", EOS]
    assert [token.logprob for token in found.choices[0].logprobs.content] == [0.0, -1.0, -2.0, -3.0]
    assert len(found.choices[0].token_ids) == 4 == found.usage.completion_tokens
    assert len(found.prompt_token_ids) == found.usage.prompt_tokens
    messages += [found.choices[0].message.model_dump(), user("more")]
    text = ""
    stream = await client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == "end" and chunk.usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match="one request has one answer"):
        await client.chat.completions.create(model="m", messages=messages, n=2)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings: Not Found"):
        await client.embeddings.create(model="m", input="x")
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided") as refused:
        await client.with_options(api_key="sk-other").chat.completions.create(model="m", messages=messages)
    assert refused.value.code == "invalid_api_key"
    return len(messages)


def halves(data, base_url, api_key):
    function = {"name": "price", "arguments": '{"item": "\\ud83d"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "\udc00"}
    ask(base_url, api_key, [user("Q\ud800"), called, result], user="\ud800", tools=TOOLS)


def test_halves_of_characters_in_a_request_are_replaced():
    [[found]], _ = play(lambda text: "end", node("halves"), [{"prompt": "x"}])
    assert found.episode["failed"] is None
    question, called, result, _ = found.episode["messages"]
    assert question["content"] == "Q�" and result["content"] == "�"
    assert called["tool_calls"][0]["function"]["arguments"] == {"item": "�"}


def test_the_client_of_openai():
    [[found]], sampler = play(
        lambda text: "end" if "3=" in text else CALL, node("a_client_of_openai"), [{"prompt": "x"}], max_turns=5
    )
    assert found.episode["failed"] is None and found.episode["reward"] == 6.0 and found.episode["forks"] == []
    assert found.earlier == () and [sampler.tokenizer.decode(segment.tokens) for segment in found.segments] == [
        "[price] SQ", CALL + EOS, "3=", "end" + EOS, "more", "end" + EOS
    ]  # fmt: skip


FAILURES = {
    "raises": "OSError: run raised OSError: no such place",
    "leaves": "SystemExit: run raised SystemExit: 3",
    "text": "run: the reward is '1', not a finite number",
    "nan": "run: the reward is nan, not a finite number",
    "silent": "requests: the agent has no answer of the policy",
}


@pytest.mark.parametrize("workers", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_an_agent_that_fails_has_no_score_and_ends_nothing_else(workers, tmp_path):
    pids = tmp_path / "pids"
    expected = FAILURES | ({"dies": "process_died: run: the process"} if workers == "process" else {})
    many = node("in_many_ways", agents.__name__, most=0.5)

    def episodes(*ways, seconds=SOON_S):
        rows = [{"prompt": "Q", "way": way, "pids": str(pids)} for way in ways]
        return play(lambda text: "a", many, rows, workers=workers, max_seconds=seconds)[0]

    found = episodes(*expected, "well", "none")
    *failed, well, none = [group[0].episode for group in found]
    for record, reason in zip(failed, expected.values(), strict=True):
        assert record["failed"].startswith(reason)
    assert (well["failed"], well["reward"], none["failed"], none["reward"]) == (None, 0.5, None, None)
    if workers == "process":
        [[hung]] = episodes("hangs", seconds=4.0)
        assert hung.episode["failed"].startswith("seconds: the episode took longer than 4 s")
        deadline = time.monotonic() + SOON_S
        while any(alive(int(pid)) for pid in pids.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(alive(int(pid)) for pid in pids.read_text().split()), "the process that hung, and its child"


ENDED = {}


def uses_the_key_of_another(data, base_url, api_key):
    if data["prompt"] == "first":
        ENDED["key"] = api_key
        return one_answer(base_url, api_key)
    while fetch(base_url, ENDED.get("key", api_key), "/models")[0] == 200:
        time.sleep(0.02)
    status, body = fetch(base_url, ENDED["key"], messages=[user("Q")])
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    return one_answer(base_url, api_key)


def one_answer(base_url, api_key):
    ask(base_url, api_key, [user("Q")])
    return 1.0


def test_a_key_is_invalid_once_its_episode_has_ended():
    found, _ = play(lambda text: "a", node("uses_the_key_of_another"), [{"prompt": "first"}, {"prompt": "second"}])
    assert [group[0].episode["failed"] for group in found] == [None, None]


def leaves_a_request(data, base_url, api_key):
    ask(base_url, api_key, [user("Q")])
    threading.Thread(target=fetch, args=(base_url, api_key), kwargs={"messages": [user("slow")]}).start()
    SLOW.wait(30)
    return 1.0


SLOW = threading.Event()  # the engine has the request


def writes_slowly(text):
    if text != "slow":
        return "a"
    SLOW.set()
    time.sleep(0.5)
    return "late"


def test_a_request_in_progress_ends_with_its_episode():
    start = time.perf_counter()
    [[found]], _ = play(writes_slowly, node("leaves_a_request"), [{"prompt": "Q"}])
    assert found.episode["failed"] is None and found.turns == 1 == found.episode["turns"] and found.earlier == ()
    assert time.perf_counter() - start < SOON_S


ANSWERED = threading.Event()  # another agent has its answer


def waits_for_its_tokens(data, base_url, api_key):
    ask(base_url, api_key, [user(data["prompt"])])
    if data["prompt"] == "short":
        ANSWERED.set()
    return 1.0


def test_the_tokens_of_one_agent_hold_up_no_other(monkeypatch):
    rendered = TurnTemplate.rendered

    def slow(self, messages, tools=None):
        assert messages[0]["content"] == "short" or ANSWERED.wait(SOON_S), "the event loop waited"
        return rendered(self, messages, tools)

    monkeypatch.setattr(TurnTemplate, "rendered", slow)
    found, _ = play(lambda text: "a", node("waits_for_its_tokens"), [{"prompt": "long"}, {"prompt": "short"}])
    assert [group[0].episode["failed"] for group in found] == [None, None]


def sends_too_much(data, base_url, api_key):
    status, body = fetch(base_url, api_key, messages=[user("x" * 2000)])
    assert status == 413 and "a request may have 0.001 MiB (the gateway of agents)" in body["error"]["message"]
    thread = threading.Thread(target=fetch, args=(base_url, api_key), kwargs=ONE)
    thread.start()
    assert BUSY.wait(SOON_S)
    status, body = fetch(base_url, api_key, **ONE)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    FREE.set()
    thread.join()
    return one_answer(base_url, api_key)


ONE = {"messages": [user("Q")]}
BUSY, FREE = threading.Event(), threading.Event()  # the engine has as many requests of the key as there may be


def test_a_request_that_is_too_large_or_one_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(server, "LIMITS", HttpLimits(body_mib=1e-3, request_s=SOON_S, connections=64))
    monkeypatch.setattr(session, "MOST", 1)
    seen = []

    def write(text):
        seen.append(text)
        if not BUSY.is_set():
            BUSY.set()
            assert FREE.wait(SOON_S)
        return "a"

    [[found]], _ = play(write, node("sends_too_much"), [{"prompt": "x"}])
    assert found.episode["failed"] is None and len(seen) == 2


def test_an_error_of_the_engine_ends_the_episodes():
    def fail(text):
        raise OSError("the engine is lost")

    with pytest.raises(OSError, match="the engine is lost"):
        play(fail, node("one_turn", agents.__name__), [{"prompt": "Q"}], samples=4)


def test_many_agents_at_the_same_time_need_no_thread_each():
    threads = []

    def write(text):
        threads.append(threading.active_count())
        return "a"

    before = threading.active_count()
    rows = [{"prompt": str(number)} for number in range(100)]
    found, sampler = play(write, node("one_turn", agents.__name__), rows, workers="process", concurrency=100)
    assert [group[0].episode["failed"] for group in found] == [None] * 100
    assert [group[0].segments[0].tokens for group in found] == [
        sampler.tokenizer(row["prompt"], add_special_tokens=False).input_ids for row in rows
    ]
    assert threads[-1] - before < 50


def test_the_object_of_an_agent_is_built_once_and_copied_for_each_episode():
    """Each episode has a fork of the process that built it, and so counts itself as the first."""
    classes = node("Prepared", agents.__name__, most=0.5)
    [found], _ = play(lambda text: "A", classes, [{"prompt": "Q"}], samples=2, workers="process")
    assert [one.episode["failed"] for one in found] == [None, None]
    assert [one.episode["reward"] for one in found] == [1.5, 1.5]


def test_an_agent_whose_object_cannot_be_built_ends_the_run():
    with pytest.raises(ValueError, match=r"^environment\.classes\.agent: most=-1 is below 0$"):
        play(lambda text: "A", node("Prepared", agents.__name__, most=-1), [{"prompt": "Q"}], workers="process")
