"""What is asked of the servers of a teacher before a run begins: are they up, of one model, and do they fit?"""

import asyncio
import logging
from typing import Any

from transformers import PreTrainedTokenizerBase

from rft.errors import Checks
from rft.remote.http_client import LOOK_S, BadResponse, RequestRefused, ServerClient, deadline
from rft.rollout.server.prompt_logprobs import PromptLogprobs, Text, TokenLogprobs, wait_until_up

KEY = "teacher"
SAMPLE = 16  # tokens of the text that all servers are asked about
APART = 0.5  # that their log-probabilities may be in the mean: each rounds in its own way


def peers(addresses: list[str]) -> list[ServerClient]:
    """The servers at some addresses."""
    return [ServerClient(number, address, KEY) for number, address in enumerate(addresses)]


def most(top_k: int, known: int) -> int:
    """How many of the likeliest tokens servers are asked for at most, so that `top_k` are among the `known` ones."""
    return min(2 * top_k, known)


async def examine(options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, longest: int | None) -> None:
    """Waits for all servers, and asks them what there is to know.

    Args:
        options: of the teacher.
        tokenizer: the policy's.
        longest: tokens of the longest row that can come, where that is known.

    Raises:
        OSError: a server is not up within its deadline, or does not answer; names it.
        ValueError: it cannot be the teacher; names it, and the cure.
    """
    check, first, known = Checks(), None, len(tokenizer)
    text = Text(tuple(range(min(known, SAMPLE))), 1)
    for peer in peers(options["addresses"]):
        teller = await _up(peer, options)
        with check():
            if longest is not None and longest >= teller.context:
                raise ValueError(
                    f"{KEY}.addresses: {peer.name} has a context of {teller.context} tokens, and rows may have "
                    f"{longest}; start it with {teller.context_flag} {longest + 1} or more"
                )
        async with deadline(f"rank 0 waits for {peer.name} to say what it knows", options["answer_s"]):
            with check():
                await _check_tokens(peer, teller, tokenizer)
            with check():
                told = await _asked(peer, teller, text, most(options["top_k"], known))
                first = first or (peer, told)
                if (told.own - first[1].own).abs().mean() > APART:
                    raise ValueError(
                        f"{KEY}.addresses: {peer.name} and {first[0].name} serve models that have nothing in common; "
                        "give servers of one model"
                    )
    check.end()


async def _up(peer: ServerClient, options: dict[str, Any]) -> PromptLogprobs:
    problem = "not asked yet"
    async with deadline(lambda: f"rank 0 waits for {peer.name} to be up ({problem})", options["start_s"]):
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    return await wait_until_up(peer)
            except BadResponse:
                raise
            except OSError as error:
                problem = str(error) or f"no answer in {LOOK_S:g} s"
            await asyncio.sleep(options["poll_s"])


async def _check_tokens(peer: ServerClient, teller: PromptLogprobs, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a ValueError where the server spells the policy's tokens differently; blanks are not compared."""
    tokens = list(range(len(tokenizer)))
    try:
        answer = await peer.post("/detokenize", {"tokens": tokens, "skip_special_tokens": False})
    except RequestRefused as error:
        logging.getLogger(__name__).warning("%s: its tokens are not compared with those of actor.tokenizer", error)
        return
    with peer.parse("what it says of tokens"):
        theirs = "".join(teller.spelt(answer).split())
    ours = "".join(tokenizer.decode(tokens, skip_special_tokens=False).split())
    if ours != theirs:
        place = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
        raise ValueError(
            f"{KEY}.addresses: {peer.name} has another tokenizer than actor.tokenizer: where one spells "
            f"{ours[place:][:12]!r} the other one spells {theirs[place:][:12]!r}; choose a teacher with the vocabulary "
            "of the actor, or the other way round"
        )


async def _asked(peer: ServerClient, teller: PromptLogprobs, text: Text, count: int) -> TokenLogprobs:
    """What a server says of a text.

    Raises:
        ValueError: it refuses.
    """
    call = teller.call(text, count)
    try:
        answer = await peer.post(call.path, call.body)
    except RequestRefused as error:
        if error.busy:
            raise
        cure = f"; start it with {teller.count_flag} {count} or more, or lower it" if teller.count_flag else ""
        raise ValueError(f"{KEY}.top_k: {error}{cure}") from error
    with peer.parse("what it says of a text"):
        return teller.read(answer, text, count)
