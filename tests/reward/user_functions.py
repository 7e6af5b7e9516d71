"""Reward functions as users of verl, TRL, OpenRLHF and this project write them."""

import asyncio
import logging
import os
import sys
import threading
import time
from pathlib import Path

CALLS = []


def ours(response, row):
    return float(response == row["answer"])


def ours_with_options(response, row, bonus, *, scale=1.0):
    return scale * (float(response == row["answer"]) + bonus)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth)
    return {"score": right, "length": len(solution_str), "source": data_source, "index": extra_info["index"]}


def signed(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == str(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "letters": len(solution_str)}


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]


def trl(prompts, completions, answer, **kwargs):
    CALLS.append((prompts, completions, answer, kwargs))
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [None if text == "" else float(text == right) for text, right in zip(texts, answer, strict=True)]


def of_the_thought(completions, prompt_opens):
    return [float(mark == "<think>") for mark in prompt_opens]


async def trl_async(completions, answer, **kwargs):
    await asyncio.sleep(0.01)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def openrlhf(queries, prompts, labels, **kwargs):
    import torch  # here: worker processes of the other functions start in tenths of a second

    right = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    return {
        "rewards": torch.tensor(right),
        "scores": torch.tensor(right),
        "extra_logs": {"twice": torch.tensor(right) * 2},
    }


def needs_ids(prompts, completions, completion_ids):
    return [0.0 for _ in completions]


def strange(text, gold):
    return 0.0


def as_it_says(response, row):
    return response if response == "text" else float(response)


def of_even_length(response, row):
    if len(response) % 2:
        raise ValueError("an odd length")
    return {"score": 0.1 * len(response), "length": len(response)}


def by_command(response, row):
    """Does what the response says."""
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        raise SystemExit(3)
    if response == "die":
        os._exit(7)
    if response == "hang":
        while True:
            time.sleep(0.01)
    if response == "lambda":
        return lambda: None
    if response == "print":
        sys.stdout.write("a word of the function\n")
    return float(len(response))


def changes_row(response, row):
    row["answer"] += "x"
    row["extra_info"]["seen"].append(response)
    return float(len(row["answer"]) + len(row["extra_info"]["seen"]))


async def changes_row_async(response, row):
    return changes_row(response, row)


def changes_info(data_source, solution_str, ground_truth, extra_info):
    extra_info["seen"].append(solution_str)
    return 1.0 + float(len(extra_info["seen"]))


def changes_columns(prompts, completions, answer, extra_info):
    for texts, info in zip(completions, extra_info, strict=True):
        info["seen"].append(texts)
    answer.clear()
    return [1.0 + float(len(info["seen"])) for info in extra_info]


ACTIVE = 0
MOST = 0


async def slow(response, row):
    global ACTIVE, MOST
    ACTIVE, MOST = ACTIVE + 1, max(MOST, ACTIVE + 1)
    await asyncio.sleep(5.0 if response == "hang" else 0.02)
    ACTIVE -= 1
    return float(response)


FAILURES = {}


def fails_twice(response, row):
    FAILURES[response] = FAILURES.get(response, 0) + 1
    if FAILURES[response] < 3:
        raise ConnectionError("not yet")
    return 1.0


STARTED = threading.Event()


async def announces(response, row):
    """Tells the test that it runs."""
    STARTED.set()
    return float(len(response))


def leaves_a_file(response, row):
    """The row names a file that a call creates; "hang" does not return."""
    Path(row["file"]).touch()
    while response == "hang":
        time.sleep(0.01)
    return float(len(response))


def shows_a_key(response, row):
    sys.stdout.write(f"printed {os.environ['RFT_TEST_KEY']}\n")
    logging.getLogger("user").warning("logged %s", os.environ["RFT_TEST_KEY"])
    return 1.0
