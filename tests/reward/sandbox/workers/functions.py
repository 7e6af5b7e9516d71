"""Reward functions that isolated workers compute; none imports torch, so a worker starts in tenths of a second."""

import asyncio


def executes(response, row):
    """A function with a hole: it executes the response, which sets `score`."""
    names = {"row": row, "score": 0.0}
    exec(response, names)
    return names["score"]


def ours(response, row, scale=1.0):
    return scale * (response == row["answer"])


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "index": extra_info["index"]}


async def trl(completions, answer, **columns):
    await asyncio.sleep(0.001)
    return [None if not text else float(text == right) for text, right in zip(completions, answer, strict=True)]


def openrlhf(queries, prompts, labels):
    right = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    return {"rewards": right, "extra_logs": {"twice": [2 * one for one in right]}}


def strange(response, row):
    return object() if response == "object" else float(row["missing"])
