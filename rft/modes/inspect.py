"""`mode=inspect`: prints what a run will read and train on, token by token, without loading a model."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from rft.actor.forward.logits import vocabulary_size
from rft.actor.init import read_config
from rft.batch.columns import lengths
from rft.data.base import GivenTexts, SourceContext, given_texts
from rft.data.datasets import Datasets
from rft.data.processes import CHUNK
from rft.data.rows.lazy import subset
from rft.distributed import SINGLE_PROCESS
from rft.errors import prefixed
from rft.registry import Target
from rft.sanitize import printable
from rft.setup.assembly import Job
from rft.setup.classes import facts_of
from rft.setup.schema import Run

TRAINED, READ, SPECIAL = "bold green", "dim", "reverse"
MARKS = ("\u27e6", "\u27e7")  # around trained tokens, on a console without colours


class Counts:
    """Numbers of the texts of a stage: row, tokens, tokens that train and answers that train, as arrays.

    Attributes:
        ends: the last trained tokens.
    """

    def __init__(self) -> None:
        self.rows, self.tokens, self.trained, self.answers = array("q"), array("q"), array("q"), array("q")
        self.ends: set[int] = set()

    def add(self, example: "Example", cut: int | None) -> None:
        """Counts a text.

        Args:
            cut: tokens of a text that is cut, which has no end; None if none is cut.
        """
        self.rows.append(example.row)
        self.tokens.append(len(example.ids))
        self.trained.append(sum(example.trains))
        self.answers.append(_runs(example.trains))
        last = [position for position, flag in enumerate(example.trains) if flag][-1:]
        self.ends |= {example.ids[position] for position in last if position + 1 != cut}


class Example(NamedTuple):
    """A text of a row: T token ids, and T flags of those that train.

    Attributes:
        row: number of the row in the order of the run, from 1.
        part: what the text is to its row if a row has several texts: chosen, rejected or mismatched.
        weighs: what its tokens and the row count in the loss; empty where all count 1.
    """

    ids: list[int]
    trains: list[bool]
    row: int
    part: str
    weighs: str = ""


def inspect(config: dict[str, Any], console: Console) -> float:
    """Prints the first rows of every stage of a run, and the lengths of all rows.

    Args:
        config: the resolved config as plain containers.

    Raises:
        Problems: all mistakes of the config and the data, after the readable rows have been printed.
    """
    job = Job(config)
    loaded, check = job.load(1), job.check
    for message in loaded.messages:
        console.print(Text(message), soft_wrap=True)
    stages = [("train", job.source, job.run.batch.prompts)]
    if job.run.warmup is not None and job.warmup_source is not None:
        stages.insert(0, ("warmup", job.warmup_source, job.run.warmup.rows))
    for name, source, prompts in stages:
        check.attempt(_show, job, loaded, name, source, prompts, console)
    check.messages = list(dict.fromkeys(check.messages))  # a bad row raises the same message in `load` and here
    check.end()
    return 0.0


def _show(job: Job, loaded: Datasets, name: str, source: Target, prompts: int, console: Console) -> None:
    run, tokenizer = job.run, loaded.tokenizer
    facts, texts = facts_of(source, None), given_texts(source.factory, source.options)
    reads = texts is not None
    if texts is None and "prompt" not in facts.fields:
        console.rule(Text(f"{name}: the engine samples all texts, and no row has a prompt", style="bold"), align="left")
        return
    limit = loaded.encoder.text_limit
    cut = limit.most if limit is not None and limit.overlong == "truncate" else None  # a text has no end behind it
    counts, first = Counts(), list[Example]()
    with prefixed("data.train: "):
        for example in _prompts(loaded) if texts is None else _examples(loaded, texts, prompts, run):
            counts.add(example, cut)
            first += [example] if example.row <= run.inspect.rows else []
    does = "trained tokens are highlighted" if reads else "prompts to sample answers from"
    if reads and facts.sampled != "never":
        does = "the given texts, trained tokens are highlighted; other answers are sampled"
    console.rule(Text(f"{name}: {does}", style="bold"), align="left")
    for example in first:
        trained = f", {sum(example.trains):,} train{example.weighs}" if reads else ""
        title = f"row {example.row}{example.part and f', {example.part}'}: {len(example.ids):,} tokens{trained}"
        console.print(Text(title, style="cyan"), soft_wrap=True)
        console.print(spelled(example, tokenizer, "" if console.is_terminal else MARKS), soft_wrap=True)
    actor, size = job.actor.options, vocabulary_size(tokenizer)
    model_config = read_config(actor.path, actor.model_config, size, "actor", actor.trust_remote_code)
    context = model_config.get_text_config().max_position_embeddings
    console.print(_numbers(counts, context, 0 if reads else run.rollout.max_new_tokens), soft_wrap=True)
    for end in sorted(counts.ends - {tokenizer.eos_token_id, *loaded.encoder.ends}) if job.grader is None else ():
        console.print(
            Text(
                f"Answers end with {tokenizer.convert_ids_to_tokens(end)!r}, not with the tokenizer's end token "
                f"{tokenizer.eos_token!r}: sampling ends there only if the model's generation config says so.",
                style="yellow",
            ),
            soft_wrap=True,
        )


def _examples(loaded: Datasets, given: GivenTexts, prompts: int, run: Run) -> Iterable[Example]:
    """The texts of the rows of an epoch in the order of the run, without rows that are drawn again to fill a batch."""
    context = SourceContext(SINGLE_PROCESS, run.seed, loaded.encoder, loaded.train, prompts, (), run.data.shuffle)
    for number, batch in enumerate(given.epoch(context)):
        each = len(batch) // prompts  # texts of a row
        left = each * (len(loaded.train) - number * prompts)
        texts = zip(batch["tokens", "input_ids"], batch["response_mask"], lengths(batch).tolist(), strict=True)
        for index, (ids, trains, length) in enumerate(islice(texts, left)):
            row, part, weighs = number * prompts + index // each + 1, _part(batch, index), _weighs(batch, index)
            yield Example(ids[:length].tolist(), trains[:length].tolist(), row, part, weighs)


def _weighs(batch: TensorDict, index: int) -> str:
    texts = ""
    if "token_weights" in batch:
        counts = {*batch["token_weights"][index][batch["response_mask"][index]].tolist()}
        texts += f", tokens weigh {' or '.join(f'{count:g}' for count in sorted(counts))}" if counts - {1.0} else ""
    return texts + (f", the row weighs {batch['row_weights'][index]:g}" if "row_weights" in batch else "")


def _part(batch: TensorDict, index: int) -> str:
    if "chosen" in batch:
        return "chosen" if batch["chosen"][index] else "rejected"
    return "mismatched" if "mismatched" in batch and batch["mismatched"][index] else ""


def _prompts(loaded: Datasets) -> Iterable[Example]:
    for start in range(0, len(loaded.train), CHUNK):
        numbers = range(start, min(start + CHUNK, len(loaded.train)))
        for number, ids in zip(numbers, loaded.encoder.prompts(subset(loaded.train, numbers)), strict=True):
            yield Example(ids, [False] * len(ids), number + 1, "")


def spelled(example: Example, tokenizer: PreTrainedTokenizerBase, marks: Sequence[str]) -> Text:
    """The text of a row. Trained tokens are highlighted and, if `marks` is not empty, put between its two marks."""
    text = Text()
    special = {*tokenizer.all_special_ids, *(n for n, token in tokenizer.added_tokens_decoder.items() if token.special)}
    kinds = list(zip((token in special for token in example.ids), example.trains, strict=True))
    borders = [index for index in range(1, len(kinds)) if kinds[index] != kinds[index - 1]]
    for start, end in zip([0, *borders], [*borders, len(kinds)], strict=True):
        (is_special, trains), ids = kinds[start], example.ids[start:end]
        style = TRAINED if trains else READ
        if marks and trains and (start == 0 or not kinds[start - 1][1]):
            text.append(marks[0])
        if is_special:
            text.append("".join(tokenizer.convert_ids_to_tokens(ids)), f"{style} {SPECIAL}")
        else:
            text.append(printable(tokenizer.decode(ids)), style)
        if marks and trains and (end == len(kinds) or not kinds[end][1]):
            text.append(marks[1])
    return text


def _numbers(found: Counts, context: int, room: int) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
    for title in ("", "min", "mean", "max"):
        table.add_column(title, justify="right" if title else "left")
    counted = {"tokens of a row": found.tokens}
    if any(found.trained):
        counted |= {"of them train": found.trained, "answers that train": found.answers}
    for title, counts in counted.items():
        table.add_row(title, f"{min(counts):,}", f"{sum(counts) / len(counts):,.1f}", f"{max(counts):,}")
    rows, long = np.array(found.rows), np.array(found.tokens) + room > context
    total = len(np.unique(rows))
    fit = total - len(np.unique(rows[long]))
    beside = f" with an answer of {room:,}" if room else ""
    table.caption = f"{fit:,} of {total:,} rows fit into the model's context of {context:,} tokens{beside}."
    table.caption_justify = "left"
    return table


def _runs(trains: list[bool]) -> int:
    return sum(flag and not before for flag, before in zip(trains, [False, *trains], strict=False))
