"""`mode=evaluate`: the metrics of an evaluation in training, for any checkpoint or model, with confidence intervals."""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rft.algorithm.roles import ROLES
from rft.batch.row_fields import PROMPT_OPENS
from rft.batch.scores import number_or_none
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.media.folder import store_media
from rft.evaluation.base import RowEvaluator, SetResult, metric_value, summary
from rft.evaluation.estimators import interval
from rft.evaluation.generation import GenerationResult
from rft.evaluation.given import GivenEvaluator
from rft.evaluation.responses import match_responses, read_responses
from rft.logger.console import titled_table
from rft.logger.history import short, write_atomically
from rft.modes.model import Answering, display
from rft.reward.compose import WeightedSum
from rft.train.folder.run_folder import ANSWERS, EVALUATION, RESCORED, RESCORED_ANSWERS


def evaluate(config: dict[str, Any], console: Console) -> float:
    """Evaluates the held-out sets, prints a table, and writes `evaluation.json` and `answers.jsonl` to output_dir.

    With `evaluate.responses` it scores given responses, see `rescore`.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero.

    Returns:
        The value of the metric that the config names.

    Raises:
        ValueError: lists all mistakes of the config, the data and the checkpoint.
    """
    job = Answering(config)
    run = job.run
    if not job.held_out:
        raise ValueError("mode=evaluate: data.eval has no held-out set; add one, such as data.eval.<name>.path=<file>")
    if run.evaluate.responses is not None:
        if not job.answers:
            raise ValueError(
                "evaluate.responses: this run evaluates no answers, but the loss or the scores of given texts; set "
                "eval.loss=false, an algorithm whose policy answers, or evaluate.responses=null"
            )
    elif job.given is not None and (beside := [role.key for role in ROLES if role.writes(job.algorithm.reads())]):
        raise ValueError(
            f"mode=evaluate: the loss needs columns of {', '.join(beside)}, and this mode loads the policy alone; set "
            "eval.loss=false, or mode=train, which evaluates before the first step"
        )
    job.world = job.join()
    with job.watchdog(job.world):
        return measure(job, console) if run.evaluate.responses is None else rescore(job, console)


def measure(job: Answering, console: Console) -> float:
    """Evaluates a model on the held-out sets; otherwise as `evaluate`."""
    run, check = job.run, job.check
    job.find(run.evaluate.checkpoint, "evaluate.checkpoint")
    sets = job.load_held_out()
    counting = job.counting_world(job.world)

    def fit(encoder: Encoder, context: int) -> None:
        given, lengths, texts = job.held_out_given, Lengths(counting, encoder, run.cache), None
        if given is not None:
            texts = run.data.text_limit(context, encoder.media_facts), given
        job.fit_held_out(sets, lengths, context, texts, console.print)
        if texts is not None:
            encoder.text_limit = texts[0]

    check.run(lambda: fit(job.policy.encoder, job.policy.context))
    check.end()
    results: Mapping[str, SetResult] = {}
    with job.measuring(sets) as evaluator, display(job.world, console) as shown:
        if isinstance(evaluator, RowEvaluator):
            results = evaluator.evaluate(shown.progress)
            numbers = summary(results)
        else:
            numbers, _ = evaluator.run(shown.progress)
    if job.world.rank == 0:
        sampled = {
            "seed": run.seed,
            "samples": run.eval.samples,
            "temperature": run.eval.temperature,
            "top_p": run.eval.top_p,
            "top_k": run.eval.top_k,
            "max_new_tokens": run.rollout.max_new_tokens,
        }
        report = {"model": job.title, **(sampled if evaluator.samples else {}), "numbers": numbers}
        console.print(table(job.title, results, {} if results else numbers))
        write_results(job, report, results, (EVALUATION, ANSWERS), console)
    return metric_value(numbers, job.metric)


def rescore(job: Answering, console: Console) -> float:
    """Scores the responses of `evaluate.responses`; no model is loaded.

    Writes `rescored.json` and `rescored.jsonl` to output_dir; otherwise as `evaluate`.
    """
    run, options = job.run, job.run.evaluate
    assert options.responses is not None
    job.check_dependencies()
    sets = job.load_held_out()
    job.check.end()
    records = read_responses(options.responses, options.columns, options.match)
    sets, answers = match_responses(sets, records, options.match, run.eval.samples, options.unanswered)
    single = all(given[0].response is not None for given in answers.values())
    if not single and "@" not in job.metric:
        raise ValueError(
            f"metric={job.metric}: {options.responses} has samples alone; set metric=eval/<set>/mean@{run.eval.samples}"
        )
    job.place_reward(job.world)
    evaluator = GivenEvaluator(job.world, sets, answers, job.reward, run.eval.ks(), run.eval.maj_k)
    with closing(job.reward), display(job.world, console) as shown:
        left_out = Counter(record.set for record in records if record.set not in ("", *job.held_out))
        for name, count in left_out.items():
            shown.message(f"{count} responses to the set {name!r} are left out: data.eval has no such set")
        results = evaluator.evaluate(shown.progress)
    numbers = summary(results)
    if job.world.rank == 0:
        report = {"responses": options.responses, "samples": run.eval.samples, "numbers": numbers}
        console.print(table(options.responses, results, {}))
        write_results(job, report, results, (RESCORED, RESCORED_ANSWERS), console)
    return metric_value(numbers, job.metric)


def write_results(
    job: Answering,
    report: dict[str, Any],
    results: Mapping[str, SetResult],
    names: tuple[str, str],
    console: Console,
) -> None:
    """Writes the report with the intervals, and the answers if there are some, to output_dir.

    Args:
        names: of the two files.
    """
    folder = Path(job.run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    written, answers = folder / names[0], folder / names[1]
    if results:
        rows = [
            store_media({"set": name, **row}, folder, folder)
            for name, result in results.items()
            for row in (generated_rows(result, job.reward) if isinstance(result, GenerationResult) else result.texts())
        ]
        write_atomically(answers, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    report |= {"intervals": {name: intervals(result) for name, result in results.items()}}
    write_atomically(written, json.dumps(report, indent=1, ensure_ascii=False))
    both = f"{written} and {answers}" if results else str(written)
    console.print(f"written to {both}", highlight=False, soft_wrap=True)


def generated_rows(result: GenerationResult, reward: WeightedSum) -> list[dict[str, Any]]:
    """The answers to each prompt of a set, with their extracted answers and scores."""
    rows = []
    for number, row in enumerate(result.rows):
        answer = {"prompt": row["prompt"], **{field: row[field] for field in reward.fields}}
        if result.greedy:
            greedy = result.greedy[number]
            answer |= {"response": greedy.texts[0], "extracted": greedy.extracted[0]}
            answer |= {"score": number_or_none(greedy.right[0])}
            answer |= {"tokens": greedy.tokens[0]} if greedy.tokens else {}
            answer |= opened(greedy.prompt_opens[0])
        if result.samples:
            sampled = result.samples[number]
            scores = map(number_or_none, sampled.right)
            samples = zip(sampled.texts, sampled.extracted, scores, sampled.prompt_opens, strict=True)
            answer["samples"] = [
                {"response": text, "extracted": extracted, "score": score} | opened(mark)
                for text, extracted, score, mark in samples
            ]
        rows.append(answer)
    return rows


def opened(mark: str | None) -> dict[str, str]:
    """The entry of an answer whose prompt ends inside of a thought, so that `evaluate.responses` scores it alike."""
    return {} if mark is None else {PROMPT_OPENS: mark}


def intervals(result: SetResult) -> dict[str, dict[str, list[float]]]:
    """The 95 % interval [low, high] of every metric, for the whole set ("all") and for each of its sources."""
    return {
        source or "all": {metric: list(interval(values)) for metric, values in by_metric.items()}
        for source, by_metric in result.by_source().items()
    }


def table(title: str, results: Mapping[str, SetResult], numbers: Mapping[str, float]) -> Table:
    """The metrics of every set, with their intervals.

    Args:
        numbers: metrics `eval/<set>/<metric>` that are not means over rows, and so have no interval here.
    """
    drawn = titled_table(title, ["set", "number"], ["count", "value", "95 % interval"])
    for name, result in results.items():
        for source, by_metric in result.by_source().items():
            for metric, values in by_metric.items():
                low, high = interval(values)
                where = f"{name}/{source}" if source else name
                mean = sum(values) / len(values)
                drawn.add_row(where, metric, str(len(values)), short(mean), f"{short(low)} to {short(high)}")
    for key, value in numbers.items():
        _, name, metric = key.split("/")
        drawn.add_row(name, metric, "", short(value), "")
    return drawn
