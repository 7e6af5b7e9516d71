"""One engine, alone in its process: python -m bench.rollout_side <rollout> <folder> <options as JSON>.

It is the one that `rollout=<rollout>` makes, and its weights are those of the actor of a run. Model and tokenizer have
no end tokens, so a row ends where its request caps it, in every engine.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bench.logprob_side import forget_peak, resident
from rft.actor.base import ModelContext
from rft.distributed import start
from rft.main import CONFIG_FOLDER
from rft.rollout.engine.base import Request
from rft.setup.assembly import Job
from rft.train.folder.settled import settle


def main(rollout: str, folder: Path, options: dict[str, Any]) -> None:
    """Writes `<rollout>.json` into the folder.

    Args:
        options: `overrides` of the config, `repeats`, and under `lengths` the workloads by name: tokens of each sample
            of each prompt.
    """
    job = job_of(rollout, folder, options["overrides"])
    world = start("cpu")
    tokenizer = job.tokenizer.build()
    strategy = job.strategy.build(world=world)
    policy = job.actor.build(context=ModelContext("actor", world, strategy, tokenizer, 0))
    model = policy.plain_model()
    tokenizer.eos_token = model.config.eos_token_id = model.generation_config.eos_token_id = None
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    before, started = forget_peak(), time.perf_counter()
    engine = job.make_engine(world, model, tokenizer, folder / rollout, None)
    try:
        sync(engine, policy)  # servers start meanwhile
        found: dict[str, Any] = {"start_s": time.perf_counter() - started, "threads": torch.get_num_threads()}
        found |= syncs(engine, policy, options["repeats"])
        found["held"] = resident("VmRSS") - before
        found["speed"] = {
            name: speed(engine, policy, prompts, lengths, job.run.rollout, options["repeats"])
            for name, lengths in options["lengths"].items()
        }
    finally:
        engine.close()
    (folder / f"{rollout}.json").write_text(json.dumps(found))


def job_of(rollout: str, folder: Path, overrides: list[str]) -> Job:
    """The default run with the model of the workload."""
    model = ["actor=hf", f"actor.path={folder / 'model'}", f"rollout={rollout}", "strategy.device=cpu"]
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        config = compose("main", [*model, *overrides])
    settle(config)
    whole: Any = OmegaConf.to_container(config, resolve=True)
    return Job(whole)


def sync(engine: Any, policy: Any) -> float:
    """Publishes all weights, each of them changed; returns the seconds it took."""
    with torch.no_grad():
        for parameter in policy.network.model.parameters():
            parameter.mul_(0.999)
    started = time.perf_counter()
    engine.wake("weights")
    engine.update_weights(engine.version + 1, policy.weights())
    engine.wake("kv_cache")
    return time.perf_counter() - started


def syncs(engine: Any, policy: Any, repeats: int) -> dict[str, Any]:
    """Seconds of each sync, and the largest memory in bytes that a sync needed in addition."""
    seconds, grown = [], []
    for _ in range(repeats):
        engine.sleep()
        before = forget_peak()
        seconds.append(sync(engine, policy))
        grown.append(resident("VmHWM") - before)
    return {"sync_s": seconds, "sync_peak": max(grown)}


def speed(
    engine: Any, policy: Any, prompts: list[list[int]], lengths: list[list[int]], sampling: Any, repeats: int
) -> dict[str, Any]:
    """Sampled tokens, and seconds, of this process's processors too, after one generation to warm up."""
    tokens, seconds, cpu, grown = [], [], [], []
    for repeat in range(1 + repeats):
        requests = [
            Request(prompt, [1000 * repeat + 8 * group + sample for sample in range(len(limits))], limits)
            for group, (prompt, limits) in enumerate(zip(prompts, lengths, strict=True))
        ]
        sync(engine, policy)  # as in every step; no prefix is left from the generation before
        before, started, worked = forget_peak(), time.perf_counter(), time.process_time()
        found = engine.generate(requests, sampling, None)
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - worked)
        grown.append(resident("VmHWM") - before)
        tokens.append([[len(completion.tokens) for completion in group] for group in found])
    assert tokens == [lengths] * (1 + repeats), "rows are not as long as they were to be"
    return {"tokens": sum(map(sum, lengths)), "seconds": seconds[1:], "cpu": cpu[1:], "peak": max(grown)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
