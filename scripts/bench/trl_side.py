"""The same steps through TRL's GRPOTrainer: python -m bench.trl_side <folder> <steps> <rows of one forward>.

Lengths are forced by a logits processor: TRL has no cap of a row's own, so the end token is forbidden before the row's
length and forced at it. It counts as a token of the row, so the rows of both sides train the same number of tokens.
"""

import functools
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.workload import GROUP, PROMPT_TOKENS, Lengths, score


class ForcedEnds(LogitsProcessor):
    """Ends each row of a batch exactly at its given length."""

    def __init__(self, lengths: Lengths, end: int) -> None:
        self._lengths = lengths
        self._end = end
        self._last = torch.empty(0)
        self.seconds = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Edits the scores (B, V) of the next token in place."""
        started = time.perf_counter()
        drawn = input_ids.shape[1] - PROMPT_TOKENS
        if drawn == 0:
            self._last = torch.tensor(self._of_rows(input_ids.tolist())) - 1  # (B,)
        scores[:, self._end] = -torch.inf
        ending = self._last == drawn
        scores[ending] = -torch.inf
        scores[ending, self._end] = 0.0
        self.seconds += time.perf_counter() - started
        return scores

    def _of_rows(self, prompts: list[list[int]]) -> list[int]:
        seen: Counter[tuple[int, ...]] = Counter()
        lengths = []
        for prompt in prompts:
            lengths.append(self._lengths.of(prompt)[seen[tuple(prompt)]])
            seen[tuple(prompt)] += 1
        return lengths


class Clock(TrainerCallback):
    """Seconds of each step, of sampling within it, and of the processor; the time of day when the first was done."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.first_end = 0.0
        self._began = self._cpu = 0.0
        self._rollout = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began, self._cpu, self._rollout = time.perf_counter(), time.process_time(), 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        total, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self.first_end = self.first_end or time.time()
        self.steps.append({"rollout": self._rollout, "total": total, "cpu": cpu})

    def timed(self, generate: Any) -> Any:
        """`generate`, with its seconds counted as sampling."""

        @functools.wraps(generate)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self._rollout += time.perf_counter() - started

        return run


def main(folder: Path, steps: int, forward_rows: int) -> None:
    """Trains and writes `trl.json` into the folder."""
    imported = time.time()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    prompts = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train", cache_dir=folder / "cache")
    lengths = Lengths(folder, tokenizer)
    forced, clock = ForcedEnds(lengths, tokenizer.eos_token_id), Clock()
    model.generate = clock.timed(functools.partial(model.generate, logits_processor=[forced]))
    rows = len(prompts) * GROUP
    options = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=forward_rows,
        gradient_accumulation_steps=rows // forward_rows,
        num_generations=GROUP,
        max_completion_length=max(max(group) for group in prompts["lengths"]),
        max_steps=steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        args=options,
        processing_class=tokenizer,
        train_dataset=prompts,
        reward_funcs=lambda completions, **_: [score(text) for text in completions],
        callbacks=[clock],
    )
    made = time.time()
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    found = {
        "steps": clock.steps,
        "reached": {"imported": imported, "trainer": made, "first step": clock.first_end},
        "tokens": [round(entry["completions/mean_length"] * rows) for entry in logs],
        "grad_norm": [entry["grad_norm"] for entry in logs],
        "forcing_s": forced.seconds / steps,
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    (folder / "trl.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
