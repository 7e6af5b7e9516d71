"""What becomes of the requests of an agent: rows of token ids."""

import json
import threading

from rft.batch.trajectory import to_rows
from rft.rollout.engine.base import row_seed
from tests.rollout.environment import scripted
from tests.rollout.environment.gateway.agents import TOOLS, ask, fetch, user
from tests.rollout.environment.scripted import play

EOS = "<eos>"


def episode(agent, write, prompt="Q", **options):
    """The trajectory of one agent, and the sampler."""
    nodes = {"agent": {"_target_": f"{__name__}.{agent.__name__}"}}
    [[found]], sampler = play(write, nodes, [{"prompt": prompt}], **{"max_turns": 20, **options})
    assert found.episode["failed"] is None, found.episode["failed"]
    return found, sampler


def texts(segments, sampler):
    return [(segment.sampled, sampler.tokenizer.decode(segment.tokens)) for segment in segments]


def ten_turns(data, base_url, api_key):
    messages = [user(data["prompt"])]
    for turn in range(10):
        answer = ask(base_url, api_key, messages, tools=TOOLS)
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"item": f"tea{turn}"}
        # as clients write it: other keys, in another order, other spaces in the arguments
        function = answer["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=2)
        messages[-1] = {"refusal": None, **answer, "annotations": None}
        messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": f"{turn} EUR"})
    return 2.5


def test_ten_turns_hold_the_tokens_that_were_sampled(monkeypatch):
    """Answers that no template would write: spaces around the text and in the call."""
    seeds = []
    generate = scripted.ScriptedSampler.generate

    def recorded(self, requests, *arguments):
        seeds.extend(seed for request in requests for seed in request.seeds)
        return generate(self, requests, *arguments)

    monkeypatch.setattr(scripted.ScriptedSampler, "generate", recorded)

    def write(text):
        return f'  so <tool_call>{{"arguments":  {{"item":"tea{text.count(EOS)}"}}, "name": "price"}}</tool_call> '

    found, sampler = episode(ten_turns, write)
    expected, seen = [(False, "[price] Q")], ["[price] Q"]
    for turn in range(10):
        answer = write(EOS * turn) + EOS
        expected += [(True, answer), (False, f"{turn} EUR=")]
        seen.append(seen[-1] + answer + f"{turn} EUR=")
    assert texts(found.segments, sampler) == expected[:-1] and found.earlier == ()
    assert [text for batch in sampler.batches for text in batch] == seen[:-1], "each prompt is all tokens so far"
    assert [segment.trains for segment in found.segments] == [False, True] * 10
    assert found.segments[3].logprobs == [-float(n) for n in range(len(found.segments[3].tokens))]
    record = found.episode
    assert (record["turns"], record["tool_calls"], record["forks"], record["reward"]) == (10, 10, [], 2.5)
    assert seeds == [0, *(row_seed(0, number, 1) for number in range(1, 10))], "the seed of the episode, then its own"
    [row] = to_rows(found, group=0, unit=0)
    assert row["turn"].max() == 10 and row["response_mask"].sum() == sum(len(s.tokens) for s in found.segments[1::2])


def rewrites(data, base_url, api_key):
    messages = [user(data["prompt"])]
    ask(base_url, api_key, messages)
    messages[-1] = {"role": "assistant", "content": "short"}
    ask(base_url, api_key, [*messages, user(" on")])


def test_a_rewritten_history_is_another_row():
    found, sampler = episode(rewrites, lambda text: "long" if EOS not in text else "end")
    [first] = found.earlier
    assert texts(first, sampler) == [(False, "Q"), (True, "long" + EOS)]
    assert texts(found.segments, sampler) == [(False, f"Qshort{EOS} on"), (True, "end" + EOS)]
    assert found.episode["forks"] == ["history"] and found.episode["turns"] == 2 and found.episode["reward"] is None
    rows = to_rows(found, group=0, unit=7)
    assert [row["turn"].max().item() for row in rows] == [1, 2] and {row["trajectory"] for row in rows} == {7}


def has_a_helper(data, base_url, api_key):
    main, helper = [user("M")], [{"role": "developer", "content": "S"}, user("H")]
    for turn in range(3):
        ask(base_url, api_key, helper)
        main[-1]["content"] += helper[-1]["content"]
        ask(base_url, api_key, main)
        helper.append(user(f"h{turn}"))
        main.append(user(f"m{turn}"))


def test_two_dialogues_of_an_agent_are_two_rows():
    found, sampler = episode(has_a_helper, lambda text: "h" if "H" in text else "m")
    [helper] = found.earlier
    assert [text for _, text in texts(helper, sampler)] == ["SH", f"h{EOS}", "h0", f"h{EOS}", "h1", f"h{EOS}"]
    assert [text for _, text in texts(found.segments, sampler)] == ["Mh", f"m{EOS}", "m0h", f"m{EOS}", "m1h", f"m{EOS}"]
    assert found.episode["forks"] == [] and found.text == "m"


def asks_twice_at_once(data, base_url, api_key):
    messages = [user("Q")]
    ask(base_url, api_key, messages)
    threads = [threading.Thread(target=ask, args=(base_url, api_key, [*messages, user("more")])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_same_request_at_the_same_time_continues_one_dialogue_alone():
    found, sampler = episode(asks_twice_at_once, lambda text: "a")
    assert [text for _, text in texts(found.earlier[0], sampler)] == ["Q", f"a{EOS}", "more", f"a{EOS}"]
    assert [text for _, text in texts(found.segments, sampler)] == [f"Qa{EOS}more", f"a{EOS}"]
    assert found.episode["forks"] == ["history"] and found.turns == 3


def meets_limits(data, base_url, api_key):
    messages = [user("Q")]
    status, body = fetch(base_url, api_key, model="any", messages=messages, max_completion_tokens=3)
    assert body["choices"][0]["finish_reason"] == "length" and body["choices"][0]["message"]["content"] == "abc"
    ask(base_url, api_key, messages)
    status, body = fetch(base_url, api_key, messages=[*messages, user("x" * 100)])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 61 tokens" in body["error"]["message"]
    ask(base_url, api_key, messages := [user("P")])
    status, body = fetch(base_url, api_key, messages=[*messages, user("x")])
    assert (status, body["error"]["code"]) == (400, "max_turns")
    return 1.0


def test_limits_of_requests_tokens_and_turns():
    found, sampler = episode(meets_limits, lambda text: "abcdef", max_turns=3, max_tokens=60)
    assert found.finish.reason == "length" and found.turns == 3
    assert [text for _, text in texts(found.earlier[0], sampler)] == ["Q", "abc"]


def writes_no_call(data, base_url, api_key):
    body = fetch(base_url, api_key, messages=[user("Q")], tools=TOOLS)[1]
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>{</tool_call>"}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_cannot_be_read_is_text():
    found, _ = episode(writes_no_call, lambda text: "<tool_call>{</tool_call>")
    assert found.episode["tool_failures"] == found.episode["tool_calls"] == 1
