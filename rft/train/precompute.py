"""The reference of a run: what can be said against its options, and how all it has to say is computed ahead."""

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rft.actor.actor import Actor
from rft.actor.precomputed import PrecomputedReference, row_keys
from rft.algorithm.algorithm import Algorithm, AlgorithmOptions
from rft.data.given.survey import only_reads
from rft.errors import Checks
from rft.metrics import Metrics
from rft.registry import Target
from rft.train.stage import Stage


def check_reference(
    options: AlgorithmOptions, algorithm: Algorithm, source: Target, precompute: bool, copied: bool
) -> None:
    """A reference that moves, or samples, can be a copy of the policy; one that is computed ahead does neither.

    Args:
        options: of the algorithm.
        source: of its batches.
        precompute: the option of the reference.
        copied: the reference is the model of the policy.
    """
    check, moves, samples = Checks(), options.iteration > 0, options.sampler == "reference"
    with check():
        if samples and only_reads(source):
            raise ValueError(
                "algorithm.sampler=reference: algorithm.source samples nothing; set algorithm.sampler=actor"
            )
    with check():
        if (moves or samples) and not copied:
            raise ValueError(
                f"algorithm.iteration={options.iteration}, algorithm.sampler={options.sampler}: the reference is to be "
                "a copy of the policy, but reference names another model than actor; leave reference.path and "
                "reference.model_config as they are, or set algorithm.iteration=0 and algorithm.sampler=actor"
            )
    reasons = {
        "nothing reads ref_logprobs": "ref_logprobs" not in algorithm.reads(),
        "algorithm.source samples, so no row comes again": not only_reads(source),
        f"algorithm.iteration={options.iteration} moves it": moves,
    }
    with check():
        if precompute and (found := [reason for reason, holds in reasons.items() if holds]):
            raise ValueError(f"reference.precompute=true: {found[0]}; set reference.precompute=false")
    check.end()


def precompute_reference(
    reference: Actor | None,
    stage: Stage,
    done: int | None,
    compute: Callable[..., dict[str, Tensor]],
    say: Callable[[str], None],
) -> None:
    """Has a reference that is computed ahead compute every row that a stage is going to draw, once. A collective.

    One that is another model than the policy does so before the run begins, and is let go before there is an optimizer.

    Args:
        done: steps of the stage, or None before the run begins.
        compute: `Trainer.compute`.
        say: tells people.

    Raises:
        ValueError: the file is gone, and so is the policy of which it spoke.
    """
    if not isinstance(reference, PrecomputedReference) or "ref_logprobs" not in stage.algorithm.reads():
        return
    if reference.complete or (done is None and reference.copied):
        return
    if done:
        raise ValueError(
            f"reference.precompute: {reference.file} is gone, and the policy is no longer what it was then; put the "
            "file back, or start again with resume=false"
        )
    started, gather = time.perf_counter(), reference.world.gather
    place = copy.deepcopy(gather(stage.source.state_dict()))
    known: dict[bytes, Tensor] = {}
    for _ in range(stage.steps):
        batch = stage.source.next(Metrics())
        stage.algorithm.filter(batch)
        new = batch[torch.tensor([key not in known for key in row_keys(batch)])]
        if any(gather(len(new) > 0)):
            found = compute(reference, batch, new, ("logprobs",), stage.source.temperature)["logprobs"]
            mine = {key: row[keep] for key, row, keep in zip(row_keys(new), found, new["keep"], strict=True)}
            for theirs in gather(mine):
                known |= theirs
    stage.source.load_state_dict(place)
    reference.write(known)
    say(f"the reference's log-probabilities of {len(known):,} rows took {time.perf_counter() - started:.0f} s")
