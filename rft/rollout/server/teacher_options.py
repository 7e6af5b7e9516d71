"""The options of a teacher on servers, and the checks of its servers before a run starts: they are up, serve one model,
and fit the policy."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from rft.actor.base import ModelOptions
from rft.actor.forward.logits import vocabulary_size
from rft.conditions import ReadWith
from rft.distributed import World
from rft.errors import Checks, Problems, messages_of
from rft.ranges import PositiveInt
from rft.remote.http_client import PROBE_S, BadResponse, RequestRefused, ServerClient, deadline, key_named
from rft.remote.retry import ServerPolicy
from rft.rollout.server.options import check_addresses
from rft.rollout.server.prompt_logprobs import PromptLogprobs, Text, TokenLogprobs, identify
from rft.waits import Reminder

KEY = "teacher"
SAMPLE = 16  # tokens of the text that all servers get
APART = 0.5  # mean difference of log-probabilities that rounding on different servers may cause


@dataclass(frozen=True)
class ServedTeacherOptions(ModelOptions, ServerPolicy):
    """What a `ServedTeacher` reads.

    Args:
        addresses: host:port of each server. All serve one model.
        token: the name of the environment variable with their key, or null where they need none.
        top_k: the number of most likely tokens that are kept of a distribution; all where fewer can follow.
        others: see `ServerPolicy`.
    """

    addresses: list[str]
    token: str | None
    top_k: Annotated[PositiveInt, ReadWith("column teacher_top_ids")]

    def clients(self) -> list[ServerClient]:
        """Clients of the servers, with the key that the environment variable `token` holds."""
        key = key_named(self.token, KEY)
        return [ServerClient.at(number, address, KEY, key) for number, address in enumerate(self.addresses)]

    def check(self, key: str, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        """Checks the addresses and what servers can compute."""
        check = Checks()
        if not self.addresses:
            check.messages.append(
                f"{KEY}.addresses=[]: there is no server to learn from; give host:port of servers that run"
            )
        check.attempt(check_addresses, self.addresses, KEY)
        check.attempt(key_named, self.token, KEY)
        if temperature != 1:
            check.messages.append(
                f"rollout.temperature={temperature:g}: servers compute log-probabilities at temperature 1 alone; "
                f"set it to 1, or choose {KEY}={KEY}, which computes them here"
            )
        check.end()

    def check_here(self, world: World, tokenizer: PreTrainedTokenizerBase, longest: Callable[[], int | None]) -> None:
        """Checks that the servers are up and fit the run; see `check_servers`."""
        tokens = longest()
        world.decide(lambda: asyncio.run(check_servers(self, tokenizer, tokens)))


def most_requested(top_k: int, known: int) -> int:
    """The largest number of most likely tokens to request, to find `top_k` with ids below `known` among them."""
    return min(2 * top_k, known)


async def check_servers(options: ServedTeacherOptions, tokenizer: PreTrainedTokenizerBase, longest: int | None) -> None:
    """Waits for all servers and checks them.

    Args:
        options: of the teacher.
        tokenizer: the policy's.
        longest: tokens of the longest row, None where that is unknown.

    Raises:
        OSError: a server is not up within its deadline, or does not answer; names it.
        ValueError: a server cannot be the teacher; names it, and the cure.
    """
    messages: list[str] = []
    first, known = None, vocabulary_size(tokenizer)
    text = Text(tuple(range(min(known, SAMPLE))), 1)
    for client in options.clients():
        api = await _up(client, options)
        if longest is not None and longest >= api.context:
            messages.append(
                f"{KEY}.addresses: {client.name} has a context of {api.context} tokens, and rows may have "
                f"{longest}; start it with {api.context_flag} {longest + 1} or more"
            )
        wait = f"rank 0 waits for {client.name} to report what it serves"
        async with deadline(wait, options.answer_s, Reminder()):
            try:
                await _check_tokens(client, api, tokenizer)
            except ValueError as error:
                messages += messages_of(error)
            try:
                found = await _request(client, api, text, most_requested(options.top_k, known))
            except ValueError as error:
                messages += messages_of(error)
                continue
            first = first or (client, found)
            if (found.own - first[1].own).abs().mean() > APART:
                messages.append(
                    f"{KEY}.addresses: {client.name} and {first[0].name} serve different models; give servers of one "
                    "model"
                )
    if messages:
        raise Problems(messages)


async def _up(client: ServerClient, options: ServedTeacherOptions) -> PromptLogprobs:
    problem = "not probed yet"
    wait = f"rank 0 waits for {client.name} to be up ({{}})"
    async with deadline(lambda: wait.format(problem), options.start_s, Reminder()):
        while True:
            try:
                async with asyncio.timeout(PROBE_S):
                    return await identify(client)
            except BadResponse:
                raise
            except OSError as error:
                if isinstance(error, RequestRefused) and error.unauthorized:
                    raise ValueError(f"{KEY}.token: {error}; name the variable with the key of the server") from error
                problem = str(error) or f"no answer in {PROBE_S:g} s"
            await asyncio.sleep(options.poll_s)


async def _check_tokens(client: ServerClient, api: PromptLogprobs, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a ValueError where the server decodes the policy's tokens to other text; whitespace is not compared."""
    tokens = sorted({*tokenizer.get_vocab().values()})
    try:
        answer = await client.post("/detokenize", {"tokens": tokens, "skip_special_tokens": False})
    except RequestRefused as error:
        logging.getLogger(__name__).warning("%s: cannot compare its tokenizer with actor.tokenizer", error)
        return
    with client.parse("the text of tokens"):
        remote = "".join(api.detokenized(answer).split())
    local = "".join(tokenizer.decode(tokens, skip_special_tokens=False).split())
    if local != remote:
        place = next((n for n, pair in enumerate(zip(local, remote, strict=False)) if pair[0] != pair[1]), -1)
        raise ValueError(
            f"{KEY}.addresses: {client.name} has another tokenizer than actor.tokenizer, which decodes the same "
            f"tokens to {local[place:][:12]!r} instead of {remote[place:][:12]!r}; choose a "
            "teacher with the vocabulary of the actor, or the other way round"
        )


async def _request(client: ServerClient, api: PromptLogprobs, text: Text, count: int) -> TokenLogprobs:
    """The log-probabilities of a text.

    Raises:
        ValueError: the server rejects the request.
    """
    call = api.call(text, count)
    try:
        answer = await client.post(call.path, call.body)
    except RequestRefused as error:
        if error.busy:
            raise
        cure = f"; start it with {api.count_flag} {count} or more, or lower it" if api.count_flag else ""
        raise ValueError(f"{KEY}.top_k: {error}{cure}") from error
    with client.parse("the log-probabilities of a text"):
        return api.read(answer, text, count)
