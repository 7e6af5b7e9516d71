"""Sampling with transformers alone: one prefill per prompt, then one batch of rows that shrinks as rows finish.

Left out: paged storage, and rows that join a running batch (rows above `max_rows` wait for the next wave).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.profiler import record_function
from transformers import Cache, PreTrainedConfig, PreTrainedTokenizerBase

from rft.actor.forward.backbone import media_part
from rft.actor.forward.logits import LogitBlocks, LogitOptions, forbidden_logits, on_tensor_cores
from rft.actor.init import meta_model
from rft.actor.model import end_tokens
from rft.batch.encoded import EncodedText, as_encoded
from rft.batch.media import concat_media
from rft.imports import import_part
from rft.ranges import PositiveInt
from rft.rollout.engine.base import (
    Completion,
    Engine,
    EngineCheckContext,
    EngineContext,
    EngineFacts,
    EngineOptions,
    OnCompletion,
    Request,
)
from rft.rollout.engine.decoding.column_weights import ColumnWeights
from rft.rollout.engine.decoding.decoder import Decoder, Rows, refusal
from rft.rollout.engine.decoding.fused_step import FusedStep, can_fuse, linear_groups
from rft.rollout.engine.decoding.step_attention import step_obstacle
from rft.rollout.engine.kv_cache import can_join, expand, make_cache
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.texts import decode, in_order, make_completion
from rft.strategy.base import DTYPES
from rft.strategy.gather import GatherOptions

GRAPHS = ("rft.rollout.engine.decoding.cuda_graphs", "StaticDecoder")  # a part: runs with cuda_graphs import it
PREFILL_TOKENS = 16384  # most tokens of one forward over prompts, padding included
FULLNESS = 0.875  # a batch with a smaller share of live rows is compacted


@dataclass(frozen=True, kw_only=True)
class HFOptions(EngineOptions):
    """Options of `HFEngine`.

    Attributes:
        max_rows: most rows decoded at once; more is faster and takes more memory for keys and values.
        dtype: of the weights and of what they compute, but for the logits, which are float32; null: the dtype in which
            the trainer computes.
        cuda_graphs: a GPU replays decode steps as CUDA graphs; for models of text whose layers attend to all tokens.
    """

    max_rows: PositiveInt
    dtype: Literal["float32", "bfloat16", "float16"] | None
    cuda_graphs: bool

    def check(self, context: EngineCheckContext) -> None:
        if self.cuda_graphs and context.device == "cpu":
            raise refusal("strategy.device=cpu has no CUDA graphs")
        if self.cuda_graphs and context.media:
            raise refusal("models that take media decode without, and actor/processor=none takes none")

    def check_here(self) -> None:
        if self.cuda_graphs and not torch.cuda.is_available():
            raise refusal("torch finds no GPU")

    def check_model(self, config: PreTrainedConfig) -> None:
        if self.cuda_graphs and (reason := step_obstacle(meta_model(config))) is not None:
            raise refusal(reason)

    def compute_dtype(self, engine_args: dict[str, Any], trainer: str) -> str:
        return self.dtype or trainer


class HFEngine(Engine):
    """Samples from a causal language model of transformers, in this process.

    While it is awake, every rank holds all weights in `dtype`; asleep, none. It does not sample from the shards, since
    that would gather every block once for each token. `update_weights` replaces the parameters of `context.model`.
    """

    Options: ClassVar[type[EngineOptions]] = HFOptions
    facts = EngineFacts(plain_torch=True, takes_media=True)
    options: HFOptions

    def __init__(self, options: HFOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        self.dtype = context.dtype if options.dtype is None else DTYPES[options.dtype]
        self.gather_options = GatherOptions(self.dtype)
        self.model = context.model.eval().requires_grad_(False)
        on_cpu = (context.device_type or self.model.device.type) == "cpu"
        wide = self.dtype.itemsize >= torch.float32.itemsize  # a CPU reorders weights of fewer bits in every product
        self.columns = ColumnWeights(linear_groups(self.model) if on_cpu and wide else [])
        self.fuses = on_cpu and wide and not options.cuda_graphs and context.media is None and can_fuse(self.model)
        self.sleep()
        head = self.model.get_output_embeddings()
        logits = partial(float32_logits, head) if self.dtype.itemsize < torch.float32.itemsize else head.forward
        vars(head)["forward"] = lambda states: logits(states[:, -1:])  # not every class takes `logits_to_keep`
        self.forbidden = context.forbidden
        self.version = 0
        self.ends = end_tokens(self.model, context.tokenizer)

    def sleep(self) -> None:
        """Drops the weights: each parameter is one zero, expanded to its shape."""
        for parameter in self.model.parameters():
            dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
            parameter.data = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the data of the parameters by the tensors, without a copy if dtype and device agree.

        Args:
            version: of the completions sampled from now on.
            tensors: by the names of the model's state dict. For tied weights one name is enough.
        """
        targets = self.model.state_dict(keep_vars=True)
        missing = {id(target): name for name, target in targets.items()}
        for name, tensor in tensors:
            assert name in targets, f"the model has no weight {name!r}"
            target = targets[name]
            assert target.shape == tensor.shape, f"{name}: {tuple(tensor.shape)} for {tuple(target.shape)}"
            with record_function("engine"):  # mode=plan counts what is allocated under this label
                target.data = tensor.detach().to(target.device, target.dtype)
            missing.pop(id(target), None)
            del tensor  # before the next one is gathered
        assert not missing, f"missing weights: {sorted(missing.values())}"
        self.version = version

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        assert all(request.prompt for request in requests), "a prompt without tokens"
        self.model.eval()
        completions: dict[tuple[int, int], Completion] = {}
        with self.columns.filled():
            for wave in waves(requests, self.options.max_rows):
                rows = [(request, index) for request, samples in wave for index in samples]
                for row, completion in self._complete(self._begin(requests, wave, sampling)):
                    completions[rows[row]] = completion
                    if on_completion is not None:
                        on_completion(*rows[row], completion)
        return in_order(completions, requests)

    def _complete(self, decoder: Decoder) -> Iterator[tuple[int, Completion]]:
        """Samples one wave of R rows.

        Yields:
            The number of a row and its completion, as soon as it is finished.
        """
        rows, stop = decoder.rows, decoder.sampling.stop
        ends = torch.tensor(self.ends, device=self.model.device, dtype=torch.int64)
        stops = StopStrings(self.context.tokenizer, stop, len(rows)) if stop else None
        start, left = 0, len(rows)
        while left > 0:
            for _ in range(min(decoder.ahead, rows.most - decoder.drawn)):
                decoder.step()
            tokens = decoder.tokens[rows.numbers, start : decoder.drawn]  # (R, n)
            columns = torch.arange(start, decoder.drawn, device=tokens.device)
            over = (tokens[..., None] == ends).any(-1) | (columns + 1 >= rows.caps[:, None])
            if stops is not None:
                over |= stops.hit(rows.numbers, tokens)
            over &= rows.live[:, None]
            done, places = (over & (over.cumsum(-1) == 1)).nonzero().unbind(1)  # where rows end
            if len(done):
                finished = rows.numbers[done]
                texts = (x[finished, : decoder.drawn].tolist() for x in (decoder.tokens, decoder.logprobs))
                lengths = (start + places + 1).tolist()
                for row, length, ids, numbers in zip(finished.tolist(), lengths, *texts, strict=True):
                    sampled = (ids[:length], numbers[:length], [self.version] * length)
                    yield row, make_completion(self.context.tokenizer, self.ends, stop, *sampled)
                left -= len(done)
                rows.live[done] = False
                if left > 0 and (size := decoder.rows_for(left)) < FULLNESS * len(rows):
                    decoder.keep(rows.compacted(size))
            start = decoder.drawn

    def _begin(self, requests: list[Request], wave: list[tuple[int, range]], sampling: Sampling) -> Decoder:
        """Reads the P prompts of a wave, and draws the first token of each of their R rows."""
        prompts = [as_encoded(requests[request].prompt) for request, _ in wave]
        copies = [len(samples) for _, samples in wave]
        seeds = [requests[request].seeds[index] for request, samples in wave for index in samples]
        limits = [requests[request].limit(index, sampling) for request, samples in wave for index in samples]
        samples = torch.tensor(copies, device=self.model.device)  # (P,)
        cache, logits, deltas = self._prefill(prompts, samples)
        longest = len(prompts[-1])
        padding = [longest - len(prompt) for prompt, count in zip(prompts, copies, strict=True) for _ in range(count)]
        rows = Rows.of(padding, seeds, limits, deltas, logits.device)
        forbidden = forbidden_logits(self.forbidden, logits.shape[-1], logits.device)
        kind = import_part(*GRAPHS, "rollout.engine.cuda_graphs=true") if self.options.cuda_graphs else Decoder
        fused = FusedStep(self.model, self.columns) if self.fuses else None
        decoder: Decoder = kind(self.model, cache, rows, longest, sampling, forbidden, fused)
        decoder.take(logits.repeat_interleave(samples, dim=0), sampling.first())
        return decoder

    def _prefill(self, prompts: list[EncodedText], samples: Tensor) -> tuple[Cache, Tensor, Tensor | None]:
        """The cache with one row per sample, and the logits (P, V) after each prompt.

        Also (R, 1), what is added to the positions of the tokens behind each row, for a model that counts positions in
        several dimensions; else None.
        """
        device = self.model.device
        parts = chunks(prompts) if can_join(self.model.config) else [range(len(prompts))]
        caches, logits, shifts = [], [], []
        for part in parts:
            texts = [prompts[i] for i in part]
            longest, ids = len(texts[-1]), left_padded([list(text) for text in texts], device)
            masks: dict[str, Tensor] = {}
            if len(texts[0]) < longest:
                padding = torch.tensor([longest - len(text) for text in texts], device=device)
                columns = torch.arange(longest, device=device) - padding[:, None]  # (P, T)
                masks = {"attention_mask": columns >= 0, "position_ids": columns.clamp(min=0)}
            shift = torch.zeros(len(texts), 1, dtype=torch.int64, device=device)  # (P, 1)
            if self.context.media is not None:
                masks, shift = self._with_media(texts, ids, masks, shift)
            shifts.append(shift)
            cache = make_cache(self.model.config)
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **masks)
            caches.append(cache)
            logits.append(out.logits[:, -1])
        last = torch.cat(logits)
        if not last.isnan().logical_not().all():
            raise ValueError(
                f"the logits after a prompt are not finite with the weights of step {self.version}, so nothing can be "
                "sampled. Likely causes: the model's folder is damaged, actor.optimizer.lr or "
                "actor.optimizer.max_grad_norm is too high, or the loss has no bound"
            )
        deltas = None if self.context.media is None else torch.cat(shifts).repeat_interleave(samples, dim=0)
        return expand(caches, [samples[part.start : part.stop] for part in parts]), last, deltas

    def _with_media(
        self, prompts: list[EncodedText], ids: Tensor, masks: dict[str, Tensor], shift: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of a forward over prompts (P, T) beside their ids, and the shift (P, 1) of later positions."""
        assert self.context.media is not None
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: left_padded([prompt.column(name) for prompt in prompts], ids.device) for name in names}
        media = concat_media(TensorDict(dict(prompt.media or {}), batch_size=[]) for prompt in prompts)
        inputs = media_part("MediaInputs")(media, self.context.media).all_tensors(self.dtype, ids.device)
        mask = masks.get("attention_mask", torch.ones_like(ids))
        own = media_part("own_positions")(self.model.base_model, columns | {"input_ids": ids}, inputs, mask)
        if own is not None:
            masks, shift = masks | {"position_ids": own[0]}, own[1]
        return columns | inputs | masks, shift


def left_padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """Rows of numbers (P, T), with zeros in front of the shorter ones."""
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)


class StopStrings:
    """Finds stop strings at the ends of the texts of R rows.

    A stop string ends in the newest token, or the row would have ended before. So only the last tokens are decoded: one
    for each byte of the longest string, and a few for characters and spaces that depend on their neighbours.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: list[str], count: int) -> None:
        self.tokenizer = tokenizer
        self.strings = strings
        self.window = max(len(string.encode()) for string in strings) + 4
        self.tails: list[list[int]] = [[] for _ in range(count)]

    def hit(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Adds the newest tokens (R, n) of the rows (R,); returns where a text holds a stop string, (R, n) bool."""
        places = rows.tolist()
        hits = [self._hit(places, column) for column in tokens.t().tolist()]
        return torch.tensor(hits, device=rows.device).t()

    def _hit(self, rows: list[int], tokens: list[int]) -> list[bool]:
        for row, token in zip(rows, tokens, strict=True):
            self.tails[row] = [*self.tails[row][1 - self.window :], token]
        texts = decode(self.tokenizer, [self.tails[row] for row in rows])
        return [any(string in text for string in self.strings) for text in texts]


def float32_logits(head: nn.Linear, states: Tensor) -> Tensor:
    """The logits (R, T, V) of states (R, T, D) in float32, computed as the trainer does, for a head of fewer bits."""
    flat = states.flatten(0, 1)
    logits = flat.new_empty(len(flat), len(head.weight), dtype=torch.float32)
    if on_tensor_cores(flat, head.weight, flat.device.type):
        torch.mm(flat, head.weight.T, out_dtype=torch.float32, out=logits)
        if head.bias is not None:
            logits += head.bias
    else:
        for part, values in LogitBlocks(flat, head.weight, head.bias, LogitOptions(1.0)):
            logits[:, part] = values
    return logits.view(*states.shape[:2], -1)


def waves(requests: list[Request], max_rows: int) -> Iterator[list[tuple[int, range]]]:
    """Splits requests, shortest prompts first, into waves of at most `max_rows` samples.

    Yields:
        (index of a request, its samples) pairs. A request is split only if it alone has more than `max_rows` samples.
    """
    wave: list[tuple[int, range]] = []
    room = max_rows
    for index in sorted(range(len(requests)), key=lambda i: len(requests[i].prompt)):
        samples = range(len(requests[index].seeds))
        while samples:
            if wave and len(samples) > room:
                yield wave
                wave, room = [], max_rows
            wave.append((index, samples[:room]))
            samples, room = samples[room:], room - len(samples[:room])
    if wave:
        yield wave


def chunks(prompts: Sequence[list[int]]) -> list[range]:
    """Splits prompts, sorted by length, into chunks of similar length: at most a fifth of a large chunk is padding."""
    cuts = [range(0, 1)]
    real = len(prompts[0])
    for index, prompt in enumerate(prompts[1:], 1):
        real += len(prompt)
        padded = (index + 1 - cuts[-1].start) * len(prompt)
        if padded <= min(1.25 * real + 256, PREFILL_TOKENS):
            cuts[-1] = range(cuts[-1].start, index + 1)
        else:
            cuts.append(range(index, index + 1))
            real = len(prompt)
    return cuts
