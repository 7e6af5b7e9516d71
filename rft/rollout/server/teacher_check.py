"""Checks of a teacher's servers before a run starts: they are up, serve one model, and fit the policy."""

import asyncio
import logging
from typing import Any

from transformers import PreTrainedTokenizerBase

from rft.actor.forward.vocabulary import vocabulary_size
from rft.errors import Problems, messages_of
from rft.remote.http_client import PROBE_S, BadResponse, RequestRefused, ServerClient, deadline, key_named
from rft.rollout.server.prompt_logprobs import PromptLogprobs, Text, TokenLogprobs, identify
from rft.waits import Reminder

KEY = "teacher"
SAMPLE = 16  # tokens of the text that all servers get
APART = 0.5  # mean difference of log-probabilities that rounding on different servers may cause


def clients_of(addresses: list[str], token: str | None) -> list[ServerClient]:
    """Clients of the servers at these addresses, with the key that the environment variable `token` holds."""
    key = key_named(token, KEY)
    return [ServerClient.at(number, address, KEY, key) for number, address in enumerate(addresses)]


def most_requested(top_k: int, known: int) -> int:
    """The largest number of most likely tokens to request, to find `top_k` with ids below `known` among them."""
    return min(2 * top_k, known)


async def check_servers(options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, longest: int | None) -> None:
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
    for client in clients_of(options["addresses"], options["token"]):
        api = await _up(client, options)
        if longest is not None and longest >= api.context:
            messages.append(
                f"{KEY}.addresses: {client.name} has a context of {api.context} tokens, and rows may have "
                f"{longest}; start it with {api.context_flag} {longest + 1} or more"
            )
        wait = f"rank 0 waits for {client.name} to report what it serves"
        async with deadline(wait, options["answer_s"], Reminder()):
            try:
                await _check_tokens(client, api, tokenizer)
            except ValueError as error:
                messages += messages_of(error)
            try:
                found = await _request(client, api, text, most_requested(options["top_k"], known))
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


async def _up(client: ServerClient, options: dict[str, Any]) -> PromptLogprobs:
    problem = "not probed yet"
    wait = f"rank 0 waits for {client.name} to be up ({{}})"
    async with deadline(lambda: wait.format(problem), options["start_s"], Reminder()):
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
            await asyncio.sleep(options["poll_s"])


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
