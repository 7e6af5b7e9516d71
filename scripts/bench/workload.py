"""The workload of both sides of the benchmark: a model, a tokenizer, prompts, and the length of each response."""

import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUP = 8
PROMPT_TOKENS = 24
SIGMA = 0.78  # of the logarithm: with 64 rows and a longest of 256 tokens, the mean length is 53 and the shortest is 8
SHORTEST = 8
PAD, END = "<pad>", "<eos>"
SIZES: dict[str, dict[str, Any]] = {
    "150m": {
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 18,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "21m": {
        "vocab_size": 32768,
        "hidden_size": 256,
        "intermediate_size": 1792,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "1m": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
}


@dataclass(frozen=True)
class Workload:
    """One step: as many prompts as `lengths` has entries, each with the lengths of its samples in tokens.
    Prompts have `prompt` tokens.

    Every step takes all prompts, so all steps are the same work.
    """

    size: str
    lengths: list[list[int]]
    prompt: int = PROMPT_TOKENS

    @property
    def rows(self) -> int:
        """Responses a step."""
        return sum(len(group) for group in self.lengths)

    @property
    def sampled(self) -> int:
        """Sampled, and trained, tokens a step."""
        return sum(sum(group) for group in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return max(max(group) for group in self.lengths)

    def write(self, folder: Path) -> int:
        """Writes `model/` with its tokenizer, `prompts.jsonl`, `held_out.jsonl`; returns the number of parameters."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = SIZES[self.size]
        config = AutoConfig.for_model(
            "qwen3",
            **shape,
            max_position_embeddings=self.prompt + self.longest,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / "model")
        save_tokenizer(folder / "model", shape["vocab_size"])
        draw = random.Random(0)
        with (folder / "prompts.jsonl").open("w") as file:
            for lengths in self.lengths:
                words = [f"w{draw.randrange(2, shape['vocab_size'])}" for _ in range(self.prompt)]
                file.write(json.dumps({"prompt": " ".join(words), "lengths": lengths}) + "\n")
        held_out = {
            "prompt": " ".join(f"w{2 + number % 2}" for number in range(self.prompt)),
            "lengths": self.lengths[0],
        }
        (folder / "held_out.jsonl").write_text(json.dumps(held_out) + "\n")
        return sum(parameter.numel() for parameter in model.parameters())

    def plain(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self) | {"rows": self.rows, "sampled_tokens": self.sampled, "longest": self.longest}


def skewed(rows: int, longest: int) -> list[list[int]]:
    """Log-normal lengths, the same every time: evenly spaced quantiles, scaled to the longest, split into groups.

    Raises:
        ValueError: the number of rows is not a multiple of the group size.
    """
    whole_groups(rows)
    quantiles = [statistics.NormalDist().inv_cdf((row + 0.5) / rows) for row in range(rows)]
    scale = math.log(longest) - SIGMA * quantiles[-1]
    lengths = [min(longest, max(SHORTEST, round(math.exp(scale + SIGMA * quantile)))) for quantile in quantiles]
    random.Random(0).shuffle(lengths)
    return [lengths[start : start + GROUP] for start in range(0, rows, GROUP)]


def equal(rows: int, length: int) -> list[list[int]]:
    """One length for all.

    Raises:
        ValueError: the number of rows is not a multiple of the group size.
    """
    whole_groups(rows)
    return [[length] * GROUP for _ in range(rows // GROUP)]


def whole_groups(rows: int) -> None:
    """Raises a ValueError if rows cannot be divided into groups."""
    if rows < GROUP or rows % GROUP:
        raise ValueError(f"--rows {rows}: give a multiple of {GROUP}, the size of a group")


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer with one token per word: `w2`, `w3`, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {PAD: 0, END: 1} | {f"w{number}": number for number in range(2, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END).save_pretrained(folder)


class Lengths:
    """The lengths of the samples of a prompt, looked up by the prompt's tokens.

    Args:
        folder: what `Workload.write` wrote.
        tokenizer: of the model in it.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._lengths: dict[tuple[int, ...], list[int]] = {}
        for line in (folder / "prompts.jsonl").read_text().splitlines():
            row = json.loads(line)
            self._lengths[tuple(tokenizer(row["prompt"]).input_ids)] = row["lengths"]

    def of(self, prompt: list[int]) -> list[int]:
        """Tokens of each sample of the prompt, in the order of its samples."""
        return self._lengths[tuple(prompt)]


def score(text: str) -> float:
    """The reward of both sides: cheap, and different from row to row, so that every group has a signal."""
    return sum(text.encode()) % 11 / 10
