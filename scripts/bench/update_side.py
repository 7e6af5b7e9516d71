"""One update, again and again: python -m bench.update_side <folder> <name> <repeats> rft [override ...] | plain <rows>.

`rft` is the actor of the main job. `plain` is what a trainer does that knows neither: all rows are padded to the
longest of the step, cut into micro-batches in the order in which they come, and go through transformers' own forward.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from bench.process import HERE
from rft.actor.base import ModelContext
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.objective import Update
from rft.batch.collate import collate, dummy_row
from rft.batch.columns import lengths
from rft.distributed import World, start
from rft.main import CONFIG_FOLDER
from rft.metrics import Metrics, peak_gib
from rft.setup.assembly import Job
from rft.train.folder.settled import settle

Gradients = dict[str, Tensor]
MeasuredUpdate = Callable[[Metrics], None]


def main(folder: Path, name: str, repeats: int, kind: str, options: list[str]) -> None:
    """Writes `<name>.json` and the gradient of the first update, `<name>.pt`, into the folder."""
    job = Job(config_of(folder, options if kind == "rft" else []))
    world = start(job.run.strategy["device"])
    tokenizer = job.tokenizer.build()
    batch = batch_of(folder, tokenizer, job.algorithm, world)
    gradients: Gradients = {}
    if kind == "rft":
        model, update = rft_update(job, world, tokenizer, batch, gradients)
    else:
        model, update = plain_update(folder, world, batch, int(options[0]), gradients)
    computed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].numel()))
    before, seconds = peak_gib(world.device), []
    for _ in range(1 + repeats):
        metrics = Metrics()
        computed.clear()
        wait(world)
        started = time.perf_counter()
        update(metrics)
        wait(world)
        seconds.append(time.perf_counter() - started)
    found = {
        "seconds": seconds,
        "tokens": int(lengths(batch).sum()),
        "computed": sum(computed),
        "forwards": len(computed),
        "memory_gib": peak_gib(world.device) - before,
        "metrics": metrics.reduce(world.gather),
    }
    torch.save(gradients, folder / f"{name}.pt")
    (folder / f"{name}.json").write_text(json.dumps(found))


def config_of(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The config of the `step` benchmark, with gradients as they are."""
    path = f"hydra.searchpath=[file://{CONFIG_FOLDER}]"
    unclipped = "actor.optimizer.max_grad_norm=1e9"
    with initialize_config_dir(str(HERE), version_base="1.3"):
        config = compose("step", [f"rollout.engine.workload={folder}", unclipped, path, *overrides])
    settle(config)
    whole: Any = OmegaConf.to_container(config, resolve=True)
    return whole


def batch_of(folder: Path, tokenizer: PreTrainedTokenizerBase, algorithm: Algorithm, world: World) -> TensorDict:
    """The workload's prompts with drawn responses and scores, up to the weights of the loss."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for group, line in enumerate((folder / "prompts.jsonl").read_text().splitlines()):
        task = json.loads(line)
        prompt = tokenizer(task["prompt"]).input_ids
        for length in task["lengths"]:
            ids = torch.tensor(prompt + [draw.randrange(2, len(tokenizer)) for _ in range(length)])
            row = {"tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "truncated": False}
            row |= {"response_mask": torch.arange(len(ids)) >= len(prompt), "group": group, "unit": len(rows)}
            rows.append(row | {"scores": draw.random()})
    batch = collate(rows)
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, world.all_sum, Metrics())
    algorithm.compute_loss_weights(batch, world.all_sum)
    return batch


def rft_update(
    job: Job, world: World, tokenizer: PreTrainedTokenizerBase, batch: TensorDict, gradients: Gradients
) -> tuple[Any, MeasuredUpdate]:
    """The model, and an update of the actor that the config describes."""
    strategy = job.strategy.build(world=world)
    actor = job.actor.build(context=ModelContext("actor", world, strategy, tokenizer, 0))
    actor.begin_training(actor.optimizer_options, 100)
    model = actor.network.model

    def before_step(*_: Any) -> None:
        if not gradients:
            gradients.update(gradients_of(model))

    actor.train_state.optimizer.register_step_pre_hook(before_step)
    dummy = dummy_row(batch, batch)
    return model, lambda metrics: actor.update(batch.clone(), dummy, Update(job.algorithm.policy), 1.0, metrics)


def plain_update(
    folder: Path, world: World, batch: TensorDict, rows: int, gradients: Gradients
) -> tuple[Any, MeasuredUpdate]:
    """The model, and an update without anything of rft but the numbers in the batch."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    prompt = int(batch["loss_mask"].long().argmax(1).min())  # the same of all rows

    def update(_: Metrics) -> None:
        for start_row in range(0, len(batch), rows):
            micro = batch[start_row : start_row + rows].to(world.device)
            ids, keep = micro["tokens", "input_ids"], micro["loss_mask"][:, prompt:]
            wanted = ids[:, prompt:]
            inputs = {"input_ids": ids, "attention_mask": micro["tokens", "attention_mask"], "use_cache": False}
            logits = model(**inputs, logits_to_keep=wanted.shape[1] + 1).logits[:, :-1]
            chosen = logits.gather(2, wanted[:, :, None])[:, :, 0]
            logprobs = chosen - torch.stack([row.logsumexp(-1) for row in logits])  # (B, T), row by row as TRL does
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -(ratio * (micro["advantages"] * micro["loss_weights"])[:, prompt:])[keep].sum()
            loss.backward()
        if not gradients:
            gradients.update(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def gradients_of(model: nn.Module) -> Gradients:
    """Whole gradients by name, on the CPU."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu().clone()
    return found


def wait(world: World) -> None:
    """Waits until the GPU has finished (`torch.cuda.synchronize`)."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
