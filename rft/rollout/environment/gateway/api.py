"""OpenAI's API of chat completions: a request as a session reads it, and the answer and errors in OpenAI's shapes."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rft.data.encode.parts import conversation
from rft.data.strict_json import value_of
from rft.data.tool_calls import Schema
from rft.rollout.answers import Answer
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.turn_template import Message
from rft.sanitize import warn_once

ORIGIN = "a request of an agent"
IN_MESSAGES = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")  # what templates read
WITHOUT_EFFECT = {"model", "user", "metadata", "store", "parallel_tool_calls", "safety_identifier", "service_tier"}
READ = WITHOUT_EFFECT | {
    "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "n", "stop", "stream", "stream_options",
    "logprobs", "top_logprobs", "response_format", "functions", "function_call", "return_token_ids",
}  # fmt: skip


class ApiError(Exception):
    """A request that the gateway refuses.

    Args:
        status: of HTTP.
        message: for the author of the agent.
        code: for programs, as OpenAI names it where it has one.
        param: the field of the request.

    Attributes:
        status: as given.
        body: the error in OpenAI's shape.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request for one answer.

    Attributes:
        messages: as chat templates take them. Messages that say the same are equal, however a client writes them.
        tools: schemas of functions by name; empty where the model may call none.
        limit: most new tokens; None: the run alone limits them.
        model: any name, which the answer repeats.
        stream: the answer is written as server-sent events.
        usage: the events include one with the numbers of tokens.
        logprobs: the answer has the log-probabilities of its tokens.
        token_ids: the answer has the ids of its tokens and of those of the prompt.
    """

    messages: list[Message]
    tools: dict[str, Schema]
    limit: int | None
    model: str
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool


def read_request(body: Any, sampling: Sampling) -> ChatRequest:
    """A request from the JSON of its body. A field that only changes how tokens are drawn is ignored with a warning.

    Args:
        sampling: of the run.

    Raises:
        ApiError: the request is malformed, or asks for what the run does not do; names the field.
    """
    try:
        return _read_request(body, sampling)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ApiError(400, f"the request is malformed: {type(error).__name__}: {error}", "invalid_value") from error


def _read_request(body: Any, sampling: Sampling) -> ChatRequest:
    given = {name: value for name, value in body.items() if value is not None}
    choice, form = given.get("tool_choice", "auto"), given.get("response_format", {"type": "text"})
    stop = given.get("stop", [])
    refused = {
        "n": (given.get("n", 1) != 1, "one request has one answer; send several requests"),
        "stop": (not {*([stop] if isinstance(stop, str) else stop)} <= {*sampling.stop}, "set rollout.stop of the run"),
        "tool_choice": (choice not in ("auto", "none"), "the model alone decides what it calls"),
        "response_format": (form != {"type": "text"}, "the answer is what the model writes"),
        "top_logprobs": (bool(given.get("top_logprobs")), "only sampled tokens have log-probabilities"),
        "functions": ("functions" in given or "function_call" in given, "use tools"),
    }
    for name, (asked, cure) in refused.items():
        if asked:
            raise ApiError(400, f"{name} is not supported here: {cure}", "unsupported_parameter", name)
    for name, value in given.items():
        if name not in READ and vars(sampling).get(name) != value:
            warn_once(
                f"an agent sets {name} in its requests, which is ignored: the options of the run decide how tokens are "
                "drawn"
            )
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_tokens={limit!r}: expected a whole number of at least 1")
    tools = {tool["function"]["name"]: tool for tool in given.get("tools", [])}
    return ChatRequest(
        messages=[_read_message(message) for message in conversation(given["messages"], "messages")],
        tools={} if choice == "none" else tools,
        limit=limit,
        model=str(given.get("model", "")),
        stream=bool(given.get("stream")),
        usage=bool(given.get("stream_options", {}).get("include_usage")),
        logprobs=bool(given.get("logprobs")),
        token_ids=bool(given.get("return_token_ids")),
    )


def _read_message(message: Message) -> Message:
    """A message as chat templates take it: a text for a content, a mapping for the arguments of a call."""
    kept = {name: message[name] for name in IN_MESSAGES if name in message}
    kept["content"] = "" if message.get("content") is None else message["content"]
    if kept["role"] == "developer":  # OpenAI's newer name
        kept["role"] = "system"
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": _read_function(call["function"])} for call in calls
        ]
    return kept


def _read_function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = value_of(function["arguments"], origin=ORIGIN)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call of {function['name']} are no object")
    return {"name": function["name"], "arguments": arguments}


@dataclass(frozen=True)
class ChatAnswer:
    """What a session answers.

    Attributes:
        name: of the answer, as the response's `id`.
        prompt: the token ids of the prompt.
        answer: what was sampled behind it, and what a forced stop inserted.
        message: what was parsed of it, as the dialogue has it.
    """

    name: str
    prompt: Sequence[int]
    answer: Answer
    message: Message

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words."""
        reason = self.answer.finish.reason
        return "tool_calls" if "tool_calls" in self.message and reason == "stop" else reason

    def body(self, request: ChatRequest, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """The response that is not streamed.

        Args:
            decode: the text of tokens.
        """
        choice = {"index": 0, "message": self._shown(), "finish_reason": self.finish_reason}
        choice |= self._tokens(request, decode)
        return self._whole("chat.completion", request, [choice], usage=self._usage(), **self._prompt(request))

    def events(self, request: ChatRequest, decode: Callable[[Sequence[int]], str]) -> str:
        """The response as server-sent events: the message, the finish reason, and the usage if it is asked for.

        Args:
            decode: the text of tokens.
        """
        shown = self._shown()
        if "tool_calls" in shown:
            shown["tool_calls"] = [{"index": number, **call} for number, call in enumerate(shown["tool_calls"])]
        first = {"index": 0, "delta": shown, "finish_reason": None} | self._tokens(request, decode)
        last = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        kind = "chat.completion.chunk"
        chunks = [self._whole(kind, request, [first], **self._prompt(request)), self._whole(kind, request, [last])]
        if request.usage:
            chunks.append(self._whole(kind, request, [], usage=self._usage()))
        return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, chunks), "[DONE]"))

    def _whole(self, kind: str, request: ChatRequest, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.name, "object": kind, "created": int(time.time()), "model": request.model}
        return head | {"choices": choices} | more

    def _prompt(self, request: ChatRequest) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt)} if request.token_ids else {}

    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self.prompt), len(self.answer.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _shown(self) -> dict[str, Any]:
        """The message with the arguments of calls as JSON, and without a content that is empty beside calls."""
        if "tool_calls" not in self.message:
            return dict(self.message)
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in self.message["tool_calls"]
        ]
        return {**self.message, "content": self.message["content"] or None, "tool_calls": calls}

    def _tokens(self, request: ChatRequest, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """What a choice has of its tokens: `logprobs` as OpenAI names it, `token_ids` as vLLM does."""
        ids = {"token_ids": self.answer.tokens} if request.token_ids else {}
        if not request.logprobs:
            return {"logprobs": None, **ids}
        texts = [decode([token]) for token in self.answer.tokens]
        numbers = [None if math.isnan(number) else number for number in self.answer.logprobs]  # JSON has no NaN
        content = [
            {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
            for text, number in zip(texts, numbers, strict=True)
        ]
        return {"logprobs": {"content": content}, **ids}
