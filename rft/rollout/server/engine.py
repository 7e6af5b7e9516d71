"""An engine that samples with HTTP servers, which all ranks share.

Every rank requests its own samples. The ranks write new weights to a folder. Rank 0 lets the servers read them or
broadcasts them, and monitors the servers; the other ranks receive from it the outcome of every update.
"""

import atexit
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import nan
from typing import Any, ClassVar

import torch
from torch import Tensor

from rft.actor.loading.tensor_names import checkpoint_names, renamed
from rft.actor.model import end_tokens
from rft.batch.encoded import as_encoded
from rft.remote.event_loop import EventLoop
from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.load_balancer import LoadBalancer
from rft.remote.server_process import LOCAL, ServerProcess, free_port
from rft.remote.server_requests import Server
from rft.rollout.engine.base import (
    Begun,
    Completion,
    Engine,
    EngineCheckContext,
    EngineContext,
    EngineFacts,
    EngineOptions,
    OnCompletion,
    Request,
)
from rft.rollout.engine.expanded import check_expanded
from rft.rollout.engine.model_folder import write_model_folder
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.texts import in_order, make_completion, until_stop
from rft.rollout.server.options import KEY, Servers
from rft.rollout.server.sample_request import SampleOptions, SampleRequest, as_begun, as_sampled
from rft.rollout.server.server_api import Sampled, ServerApi, key_environment, server_prompt
from rft.rollout.server.server_pool import ServerPool
from rft.rollout.server.weights.store import WeightStore
from rft.rollout.server.weights.version import WeightVersion
from rft.strategy.gather import GatherOptions


@dataclass(frozen=True, kw_only=True)
class ServersOptions(EngineOptions):
    """Options of `ServersEngine`.

    Attributes:
        servers: their addresses or number, and deadlines.
    """

    servers: Servers

    def check(self, context: EngineCheckContext) -> None:
        self.servers.check_dtype(context.engine_args)
        if context.while_updating is not None and self.servers.sleep:
            raise ValueError(
                f"{KEY}.sleep=true: with rollout.staleness above 0 the servers sample while the run trains; set it to "
                "false"
            )

    def unread(self) -> dict[str, str]:
        reason = f"{KEY}.count=0: the run starts no server, and running servers have their own flags"
        return {"engine_args": reason} if self.servers.count == 0 else {}


class ServersEngine(Engine):
    """Samples with servers of one kind, which the run starts or which run already; a subclass names its `server_api`.

    Servers must be able to read the folder of the run. `rollout.engine_args` become flags of those that the run starts.

    Attributes:
        server_api: how a server is started and called.
        sleep_arguments: engine arguments that servers with a GPU need to be able to sleep.
    """

    Options: ClassVar[type[EngineOptions]] = ServersOptions
    facts = EngineFacts(takes_arguments=True, takes_media=True, has_processor=True, servers=True)
    server_api: ClassVar[type[ServerApi]]
    sleep_arguments: ClassVar[dict[str, Any]] = {}
    gather_options = GatherOptions(sharded=True)
    options: ServersOptions

    def __init__(self, options: ServersOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        servers = options.servers
        world, model, tokenizer = context.world, context.model, context.tokenizer
        if servers.count and int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) < world.size:
            raise ValueError(
                f"{KEY}.count={servers.count}: this run has processes on several machines, and servers that it starts "
                f"are reachable from one machine only; start them with mode=serve and give {KEY}.addresses"
            )
        self.version = self._arriving = 0
        self._continues = context.while_updating == "abort"
        self._begun: dict[str, Begun] = {}  # by identity, until `ended`: what an earlier run has sampled
        self._complete: dict[int, list[tuple[SampleRequest, Sampled]]] = {}  # by order, until `ended`
        self._ends = end_tokens(model, tokenizer)
        self._names = checkpoint_names(model)
        self._vocabulary = model.config.get_text_config().vocab_size
        arguments = self.arguments(context.engine_args, servers)
        self._server_api = self.server_api(arguments, context.media, context.forbidden)
        self._server_api.recomputes = context.while_updating == "recompute"
        self._request_fields: dict[str, str] = {}  # of the body, beside those of `ServerApi.request`
        self._counts: Counter[str] = Counter()
        self._sent = 0
        self._loop = EventLoop("servers")
        folder = context.folder.resolve()  # a server may have another working folder
        model_folder = folder / "engine"
        ports = world.decide(lambda: [free_port() for _ in range(servers.count)])
        addresses = servers.addresses or [f"{LOCAL}:{port}" for port in ports]
        key: str | None = world.decide(servers.key)
        clients = [ServerClient.at(number, address, key=key) for number, address in enumerate(addresses)]
        self._servers = [Server(client, float(servers.concurrency)) for client in clients]
        self._balancer = LoadBalancer(
            who=f"rank {world.rank}",
            what="sample",
            wanted="serves version 0",
            servers=self._servers,
            probe=self._probe,
            policy=servers,
            key=KEY,
            counts=self._counts,
        )
        self._pool: ServerPool | None = None
        world.decide(lambda: write_model_folder(model, tokenizer, model_folder, context.media))
        self._weight_store = WeightStore(folder / "weights", model_folder, servers.torch_dtype, world, servers.deltas)
        self.gather_options = self._weight_store.gather_options
        if world.rank == 0:
            self._processes = []
            for number, port in enumerate(ports):
                command, environment = self._server_api.command(servers.python or sys.executable, model_folder, port)
                environment |= key_environment(key)
                self._processes.append(ServerProcess(command, environment, folder / "servers" / f"{number}.log"))
            self._pool = ServerPool(self._server_api, clients, self._processes, servers, world.device, model_folder)
            self._loop.run(self._pool.watch())
        atexit.register(self.close)

    @classmethod
    def check_sampling(cls, sampling: Sampling, logprobs: bool) -> None:
        api = cls.server_api({})
        api.check(sampling)
        if logprobs and (message := api.unknown_logprobs(sampling)):
            raise ValueError(message)

    @classmethod
    def arguments(cls, engine_args: dict[str, Any], servers: Servers) -> dict[str, Any]:
        """The engine arguments of servers that the run starts."""
        return (cls.sleep_arguments if servers.sleep and torch.cuda.is_available() else {}) | engine_args

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Samples every request; see `Engine.generate`. Log-probabilities that the servers do not report are NaN.

        Raises:
            OSError: the servers do not return the samples within their deadlines; names them.
            OtherPrompt: a server expands a prompt with media to other tokens than the trainer reads.
        """
        completions: dict[tuple[int, int], Completion] = {}
        tokenizer, unknown = self.context.tokenizer, bool(self._server_api.unknown_logprobs(sampling))

        def finish(request: int, sample: int, answer: Sampled) -> None:
            prompt, order = requests[request].prompt, requests[request].order
            if order >= 0:
                self._complete.setdefault(order, []).append((samples[request][sample], answer))
            if as_encoded(prompt).raw is not None:
                check_expanded(request, prompt, answer.prompt or [], tokenizer)
            tokens, logprobs = answer.tokens, [nan] * len(answer.tokens) if unknown else answer.logprobs
            versions = [version for version in answer.versions if version is not None]
            if answer.parts > 1:  # a stop string may begin in one part and end in the next
                end = until_stop(tokenizer, sampling.stop, tokens)
                tokens, logprobs, versions = tokens[:end], logprobs[:end], versions[:end]
            completion = make_completion(tokenizer, self._ends, sampling.stop, tokens, logprobs, versions)
            completions[request, sample] = completion
            if on_completion is not None:
                on_completion(request, sample, completion)

        samples = [self._sample_requests(request, sampling) for request in requests]
        asked: list[list[SampleRequest]] = []
        places: list[list[int]] = []  # of what is asked for among the samples of its request
        for number, its in enumerate(samples):
            for sample, one in enumerate(its):
                if one.complete and one.begun is not None:
                    finish(number, sample, one.begun)
            places.append([sample for sample, one in enumerate(its) if not one.complete])
            asked.append([its[sample] for sample in places[-1]])
        order = min((request.order for request in requests), default=0)
        self._loop.run(
            self._balancer.run(asked, lambda number, place, found: finish(number, places[number][place], found), order)
        )
        return in_order(completions, requests)

    async def _probe(self, client: ServerClient) -> str | None:
        with client.parse("its version"):
            version = await self._server_api.version(client)
        return None if version in (self.version, self._arriving) else f"serves version {version}"

    def _sample_requests(self, request: Request, sampling: Sampling) -> list[SampleRequest]:
        """One request per seed."""
        assert max(request.prompt) < self._vocabulary, "a token id beyond the vocabulary ends some servers"
        prompt = server_prompt(request.prompt)
        how = SampleOptions(
            self._server_api,
            self._ends,
            sampling,
            oldest=self.version,
            newest=lambda: self._arriving,
            continues=self._continues,
            fields=self._request_fields,
        )
        samples = [
            SampleRequest(prompt, seed, request.limit(sample, sampling), how)
            for sample, seed in enumerate(request.seeds)
        ]
        if not self._begun:
            return samples
        known = [self._begun.get(one.identity) for one in samples]
        return [
            one if its is None else replace(one, begun=as_sampled(its)) for one, its in zip(samples, known, strict=True)
        ]

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the weights and lets the servers load them. A collective.

        Raises:
            OSError: the disk fails, or no server acknowledges the version within its deadline; names it.
            ValueError: a tensor has an unsupported dtype; names it.
        """
        self._commit(self._weight_store.write(version, renamed(tensors, self._names)))

    def _commit(self, weights: WeightVersion) -> None:
        """Rank 0 lets the servers load a version. A collective."""

        def commit() -> None:
            assert self._pool is not None
            self._loop.run(self._pool.commit(weights))

        self._arriving = weights.version
        self._loop.run(self._balancer.pause())
        try:
            self.context.world.decide(commit)
        finally:
            self._loop.run(self._balancer.resume())
        self._weight_store.keep(weights)
        self.version, self._balancer.wanted = weights.version, f"serves version {weights.version}"

    def sleep(self) -> None:
        """Releases the servers' memory once all ranks have their samples; `update_weights` wakes them. A collective.

        Raises:
            OSError: no server goes to sleep within its deadline; names it.
        """
        if self.options.servers.sleep:
            self.context.world.gather(None)
            self.context.world.decide(self._sleep_servers)

    def _sleep_servers(self) -> None:
        assert self._pool is not None
        self._loop.run(self._pool.sleep())

    def abort(self) -> None:
        """Ends the `generate` of other threads; they raise a `RequestFailed`."""
        if self._loop.alive:
            self._loop.run(self._balancer.abort(RequestFailed("the sampling was given up")))

    def close(self) -> None:
        """Ends the servers that the run started and deletes the weights that were written for servers."""
        if not self._loop.alive:
            return
        if self._pool is not None:
            self._loop.run(self._pool.stop())
            for process in self._processes:
                process.end()
            for process in self._processes:
                process.wait()
            shutil.rmtree(self._weight_store.folder, ignore_errors=True)
        self._loop.close()

    def begun(self) -> list[Begun]:
        """What is known of the samples of groups that have not ended: those that are complete, and with
        `while_updating=abort` what was sampled of the others before the last update. Answers to media are left out,
        which the servers could not continue."""
        known: list[tuple[int, SampleRequest, Sampled | None]] = []
        for order, request in self._loop.run(self._balancer.unfinished()):
            assert isinstance(request, SampleRequest)
            known.append((order, request, request.begun))
        known += [(order, *pair) for order, pairs in [*self._complete.items()] for pair in [*pairs]]
        told = [as_begun(order, one, part) for order, one, part in known if part and not one.prompt.media]
        return [*(dict(self._begun) | {one.identity: one for one in told}).values()]

    def continue_from(self, begun: list[Begun]) -> None:
        self._begun |= {one.identity: one for one in begun}

    def ended(self, order: int) -> None:
        self._complete.pop(order, None)
        for identity in [identity for identity, one in [*self._begun.items()] if one.order == order]:
            del self._begun[identity]

    def health(self) -> dict[str, float]:
        """Counts since the last call.

        Returns:
            `retries` and `hedged`: groups that were requested again after a failure, and that two servers worked on;
            unless transport=folder also `sent_mib`: MiB of weights that were sent to the servers' workers.
        """
        counts = {name: float(self._counts[name]) for name in ("retries", "hedged")}
        if self.options.servers.transport != "folder":
            sent = self._pool.sent() if self._pool is not None else 0
            counts["sent_mib"], self._sent = (sent - self._sent) / 2**20, sent
        self._counts.clear()
        return counts
