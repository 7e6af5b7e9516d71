"""Requests of OpenAI's API, and the shapes of answers."""

import json
import logging

import pytest

from rft.rollout.answers import uncut
from rft.rollout.engine.base import Completion
from rft.rollout.environment.gateway.api import ApiError, ChatAnswer, read_request
from rft.sanitize import warn_once
from tests.rollout.environment.gateway.agents import TOOLS, user
from tests.rollout.environment.scripted import SAMPLING

Q = [user("Q")]
CALL = {"id": "call00000", "type": "function", "function": {"name": "price", "arguments": '{"item": "tea"}'}}


def answer(**message):
    completion = Completion([5, 6], [-0.5, float("nan")], "stop", "ab", [1, 1])
    return ChatAnswer("chatcmpl-0-1", [1, 2, 3], uncut(completion), {"role": "assistant", "content": "ab", **message})


def test_messages_that_say_the_same_are_equal():
    one = [{"role": "developer", "content": "S"}, *Q, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    parts = [{"type": "text", "text": "Q"}]
    spaced = CALL | {"index": 0, "function": {"arguments": '{ "item":"tea"}', "name": "price"}}
    other = [
        {"role": "system", "content": "S", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [spaced]},
    ]
    read = [read_request({"messages": messages}, SAMPLING).messages for messages in (one, other)]
    assert read[0] == read[1] and read[0][2]["tool_calls"][0]["function"]["arguments"] == {"item": "tea"}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ([], "the request is malformed", None),
        ({}, "KeyError: 'messages'", None),
        ({"messages": []}, "messages is empty", None),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 0", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "malformed", None),
        ({"messages": Q, "max_tokens": 0}, "max_tokens=0: expected a whole number of at least 1", None),
        ({"messages": Q, "tools": [{}]}, "KeyError: 'function'", None),
        ({"messages": Q, "stream_options": 3}, "AttributeError", None),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[]"}}]}]},
         "the arguments of a call of f are no object", None),
        ({"messages": Q, "n": 2}, "n is not supported here: one request has one answer", "n"),
        ({"messages": Q, "stop": "x"}, "stop is not supported here: set rollout.stop of the run", "stop"),
        ({"messages": Q, "tool_choice": "required"}, "tool_choice is not supported here", "tool_choice"),
        ({"messages": Q, "response_format": {"type": "json_object"}}, "response_format is not", "response_format"),
        ({"messages": Q, "top_logprobs": 3}, "top_logprobs is not", "top_logprobs"),
        ({"messages": Q, "functions": []}, "functions is not supported here: use tools", "functions"),
    ],
)  # fmt: skip
def test_what_the_policy_cannot_do_is_refused(body, message, param):
    with pytest.raises(ApiError, match=message) as found:
        read_request(body, SAMPLING)
    error = found.value.body["error"]
    assert found.value.status == 400 and error["param"] == param and error["type"] == "invalid_request_error"


def test_how_tokens_are_drawn_is_the_run_s_matter_and_said_once(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read_request(
                {"messages": Q, "temperature": 0.2, "top_p": SAMPLING.top_p, "seed": 3, "user": "me"}, SAMPLING
            )
    said = sorted(record.getMessage().split(" in its")[0] for record in caplog.records)
    assert said == ["an agent sets seed", "an agent sets temperature"]


def test_without_a_choice_of_tools_there_are_none():
    assert set(read_request({"messages": Q, "tools": TOOLS}, SAMPLING).tools) == {"price"}
    assert read_request({"messages": Q, "tools": TOOLS, "tool_choice": "none"}, SAMPLING).tools == {}


def test_an_answer_has_the_shape_of_openai_and_the_tokens_where_they_are_asked_for():
    plain = read_request({"messages": Q, "model": "gpt"}, SAMPLING)
    body = answer().body(plain, str)
    assert body.pop("created") > 1.7e9
    assert body == {
        "id": "chatcmpl-0-1", "object": "chat.completion", "model": "gpt",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop",
                     "logprobs": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip
    whole = read_request({"messages": Q, "logprobs": True, "return_token_ids": True}, SAMPLING)
    body = answer().body(whole, lambda ids: chr(90 + ids[0]))
    assert body["prompt_token_ids"] == [1, 2, 3] and body["choices"][0]["token_ids"] == [5, 6]
    assert body["choices"][0]["logprobs"]["content"] == [
        {"token": "_", "logprob": -0.5, "bytes": [95], "top_logprobs": []},
        {"token": "`", "logprob": None, "bytes": [96], "top_logprobs": []},
    ], "JSON has no NaN"


def test_calls_are_json_and_streamed_with_their_place():
    call = CALL | {"function": {"name": "price", "arguments": {"item": "tea"}}}
    called = answer(content="", tool_calls=[call])
    [choice] = called.body(read_request({"messages": Q}, SAMPLING), str)["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert choice["finish_reason"] == "tool_calls"
    asked = {"messages": Q, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    lines = called.events(read_request(asked, SAMPLING), str).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    first, last, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-2])
    assert first["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **CALL}] and first["prompt_token_ids"] == [
        1,
        2,
        3,
    ]
    assert first["choices"][0]["finish_reason"] is None and first["choices"][0]["token_ids"] == [5, 6]
    assert last["choices"][0]["finish_reason"] == "tool_calls" and last["choices"][0]["delta"] == {}
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 5
