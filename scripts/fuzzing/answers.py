"""Random answers of servers: of rewards, judges and engines. Each is a bad response, or numbers and tokens that fit.

A bad response is what `ServerClient.parse` makes of the errors that a reader may raise.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from bench.reward_yaml import options

from fuzzing.pieces import changed
from rft.remote.http_client import BadResponse, ServerClient
from rft.reward.models.grade import Grade
from rft.reward.services.judge_server import verdict_text
from rft.reward.services.protocol import Mapped, NemoGym, OpenRLHF, Rft
from rft.reward.term import Unscored
from rft.rollout.server.prompt_logprobs import Text, TokenLogprobs
from rft.rollout.server.server_api import Sampled
from rft.rollout.server.sglang import SGLangApi, SGLangPromptLogprobs
from rft.rollout.server.vllm import VLLMApi, VLLMPromptLogprobs

TEXT = Text((5, 6, 7), 1)
BODY = {"id": "1", "term": "a", "responses": ["x", "y"], "rows": [{}, {}]}
RESULT = {"total": 0.5, "terms": {"a": 1.0, "b": 0.0}, "unscored": {}, "numbers": {"a/f1": 0.25}}
RFT = {"id": "1", "fingerprint": "f", "count": 2, "results": [RESULT, RESULT | {"unscored": {"a": "deadline"}}]}
TOP = {"5": {"logprob": -0.5, "rank": 1}, "6": {"logprob": -1.0, "rank": 2}, "7": {"logprob": -9.0, "rank": 40}}
SPAN = {"start": 0, "end": 2, "version": "3"}
CONTENT = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]
CHOICE = {"finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"content": CONTENT}, "weight_versions": [SPAN]}
ABOUT = {
    "finish_reason": {"type": "stop"},
    "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
    "weight_version": "3",
}
INPUT = {
    "input_token_logprobs": [[None, 5], [-0.5, 6], [-1.0, 7]],
    "input_top_logprobs": [None, *[[[-0.5, 5], [-1.0, 6]]] * 2],
}


class Reader(NamedTuple):
    """What reads the answers of one kind of server.

    Attributes:
        good: an answer that can be read.
        read: reads one.
    """

    good: Any
    read: Callable[[Any], Any]


def _grade() -> Grade:
    return Grade.of(options("terms/judge_server.yaml")["judge_server"]["grade"], ["yes", "no"], "grade")


READERS = {
    "rft": Reader(RFT, lambda answer: Rft("a").read(BODY, answer, 2)),
    "rft sum": Reader(RFT, lambda answer: Rft(None).read(BODY | {"term": None}, answer, 2)),
    "openrlhf": Reader(
        {"rewards": [0.5, 1], "extra_logs": {"f1": [0, 1]}}, lambda answer: OpenRLHF().read({}, answer, 2)
    ),
    "nemo_gym": Reader({"reward": 1.0, "mask_sample": False}, lambda answer: NemoGym().read({}, answer, 1)),
    "mapping": Reader({"a": [{"b": 0.5}]}, lambda answer: Mapped({}, "a.0.b").read({}, answer, 1)),
    "judge": Reader(
        {"choices": [{"message": {"content": "Verdict: yes"}}]}, lambda answer: [_grade()(verdict_text(answer))]
    ),
    "vllm": Reader({"choices": [CHOICE], "model": "policy"}, VLLMApi({}).parse),
    "sglang": Reader({"meta_info": ABOUT, "output_ids": [5, 6]}, SGLangApi({}).parse),
    "vllm text": Reader(
        {"choices": [{"prompt_logprobs": [None, TOP, TOP]}]},
        lambda answer: VLLMPromptLogprobs(64).read(answer, TEXT, 2),
    ),
    "sglang text": Reader({"meta_info": INPUT}, lambda answer: SGLangPromptLogprobs(64).read(answer, TEXT, 2)),
}
CLIENT = ServerClient("the server", "http://localhost:1")


def make(random: Random) -> dict[str, Any]:
    """A kind of server, and an answer."""
    kind = random.choice([*READERS])
    return {"kind": kind, "answer": changed(random, READERS[kind].good)}


def title(made: dict[str, Any]) -> str:
    """What inputs have in common whose faults are probably one."""
    return str(made["kind"])


def check(made: dict[str, Any]) -> None:
    """Raises an AssertionError, or whatever else is raised, where the outcome is none of those of the module."""
    try:
        with CLIENT.parse("the answer"):
            found = READERS[made["kind"]].read(made["answer"])
    except BadResponse as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, f"a message of several lines: {error}"
        return
    check_read(found)


def check_read(found: Any) -> None:
    """Raises an AssertionError where what was read is not what it should be."""
    if isinstance(found, Sampled):
        _check_tokens([*found.tokens, *(found.prompt or [])])
        assert all(type(one) in (int, float) and one <= 1e-3 for one in found.logprobs), f"log-probabilities: {found}"
        assert all(one is None or one >= 0 for one in found.versions), f"the versions {found.versions}"
    elif isinstance(found, TokenLogprobs):
        assert found.own.shape == (2,) and found.ids.shape == found.logprobs.shape == (2, 2), f"shapes: {found}"
        assert not torch.cat([found.own, found.logprobs.flatten()]).isnan().any(), f"no numbers: {found}"
        _check_tokens(found.ids.flatten().tolist())
    else:
        for one in found:
            assert isinstance(one, Unscored) or all(
                type(value) is float and math.isfinite(value)
                for value in (one.values() if isinstance(one, dict) else [one])
            ), f"no finite numbers: {found}"


def _check_tokens(tokens: list[Any]) -> None:
    assert all(type(token) is int and 0 <= token < 2**31 for token in tokens), f"no ids of tokens: {tokens}"
