"""A teacher behind servers that already run: this process has no weights of it and sends requests."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from rft.actor.base import ColumnModel, Columns, ModelContext
from rft.actor.forward.logits import forbidden_tokens, vocabulary_size
from rft.remote.http_client import ServerClient
from rft.remote.load_balancer import LoadBalancer
from rft.remote.server_requests import Call, Server
from rft.rollout.server.prompt_logprobs import PromptLogprobs, Text, TokenLogprobs, identify
from rft.rollout.server.teacher_options import KEY, ServedTeacherOptions, most_requested


@dataclass(frozen=True)
class LogprobRequest:
    """Requests the log-probabilities of the tokens of a text; see `ServerRequest`.

    Attributes:
        text: the text, as tokens.
        count: most likely tokens to report at each position.
        apis: the kind of each server.
    """

    text: Text
    count: int
    apis: Mapping[ServerClient, PromptLogprobs]

    def call(self, client: ServerClient) -> Call:
        return self.apis[client].call(self.text, self.count)

    def read(self, client: ServerClient, answer: Any) -> TokenLogprobs:
        return self.apis[client].read(answer, self.text, self.count)


class ServedTeacher(ColumnModel):
    """Computes the columns of a `Teacher` with requests to servers of vLLM or SGLang."""

    Options = ServedTeacherOptions
    options: ServedTeacherOptions
    remote: ClassVar[bool] = True

    def __init__(self, context: ModelContext, options: ServedTeacherOptions) -> None:
        super().__init__(context, options)
        top_k = options.top_k
        self._servers = [Server(client, float(options.concurrency)) for client in options.clients()]
        self._apis: dict[ServerClient, PromptLogprobs] = {}
        size = vocabulary_size(context.tokenizer) or top_k  # mode=plan may run without a tokenizer
        self._following = torch.ones(size, dtype=torch.bool)
        self._following[list(forbidden_tokens(size, context.tokenizer, context.media))] = False
        self._top_k = min(top_k, int(self._following.sum()))
        self._most, self._spare = most_requested(top_k, size), 0

    def compute_outputs(
        self, batch: TensorDict, outputs: tuple[str, ...], temperature: float, dummy: TensorDict | None
    ) -> Columns:
        """See `ColumnModel.compute`; not a collective.

        Raises:
            OSError: the servers do not answer within their deadlines; names them.
            ValueError: too many of the tokens that they return are not in the policy's vocabulary.
        """
        assert temperature == 1
        columns = self.blank(batch, outputs)
        texts = texts_of(batch)
        reported = asyncio.run(
            self._request(texts, batch["group"].tolist(), self._top_k if "top_ids" in outputs else 0)
        )
        for row, text in texts.items():
            here, found = slice(text.first, len(text.tokens)), reported[text]
            keep = batch["loss_mask"][row, here].cpu()
            numbers = {"logprobs": found.own, "top_ids": found.ids, "top_logprobs": found.logprobs}
            for name, column in columns.items():
                column[row, here][batch["loss_mask"][row, here]] = numbers[name][keep].to(column.device)
        return columns

    def blank(self, batch: TensorDict, outputs: tuple[str, ...]) -> Columns:
        flat = batch["loss_mask"].float()[..., None] * 0
        wide = flat.repeat(1, 1, self._top_k)
        columns = {"logprobs": flat[..., 0], "top_ids": wide.int(), "top_logprobs": wide}
        return {name: columns[name] for name in outputs}

    async def _request(self, texts: Mapping[int, Text], groups: Sequence[int], top_k: int) -> dict[Text, TokenLogprobs]:
        """Requests the log-probabilities of each distinct text once, the texts of a group together.

        Where servers return tokens that the policy does not have, more tokens are requested, from then on at once.
        """
        found: dict[Text, TokenLogprobs] = {}
        wanted = {text: groups[row] for row, text in texts.items()}
        count = min(top_k + self._spare, self._most) if top_k else 0
        while wanted:
            together: dict[int, list[Text]] = defaultdict(list)
            for text, group in wanted.items():
                together[group].append(text)
            requests = [[LogprobRequest(text, count, self._apis) for text in group] for group in together.values()]
            answers = await self._balancer().run(requests)
            for text, answer in zip(chain(*together.values()), chain(*answers), strict=True):
                if not (lacking := answer.lacking(self._following, top_k)):
                    found[text] = answer.restrict(self._following, top_k)
                    del wanted[text]
                elif count == self._most:
                    raise ValueError(
                        f"{KEY}.top_k={top_k}: of the {count} most likely tokens of the served model {lacking} too "
                        f"many are beyond the {int(self._following.sum())} of actor.tokenizer; lower it"
                    )
                self._spare = max(self._spare, 2 * lacking)
            count = self._most
        return found

    def _balancer(self) -> LoadBalancer:
        return LoadBalancer(
            who=f"rank {self.world.rank}",
            what="text",
            wanted="is up",
            servers=self._servers,
            probe=self._probe,
            policy=self.options,
            key=self.key,
            counts=Counter(),
        )

    async def _probe(self, client: ServerClient) -> None:
        self._apis[client] = await identify(client)


def texts_of(batch: TensorDict) -> dict[int, Text]:
    """The texts to request, by row; rows without a token to learn from have none."""
    found = {}
    for row, (ids, keep) in enumerate(zip(batch["tokens", "input_ids"].tolist(), batch["loss_mask"], strict=True)):
        if places := keep.nonzero()[:, 0].tolist():
            found[row] = Text(tuple(ids[: places[-1] + 1]), places[0])
    return found
