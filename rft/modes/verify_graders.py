"""The part of `mode=verify` that certifies the terms of the reward on rows of the run's data sets."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from operator import or_

from rich.console import Console
from rich.table import Table

from rft.batch.row_fields import PROMPT_OPENS
from rft.data.row_checks import check_rows
from rft.data.rows.lazy import PlacedRows, Row, Rows, load, place
from rft.distributed import SINGLE_PROCESS
from rft.logger.console import titled_table, verdict
from rft.modes.model import display
from rft.redaction import redact
from rft.reward.call import head
from rft.reward.certificate.grader import GraderCertificate, Kind, certify, probes
from rft.reward.compose import WeightedSum
from rft.setup.components import Components

SHOWN = 3  # texts of a term that are printed


def certify_graders(job: Components, console: Console) -> bool:
    """Scores texts whose scores are known, and prints a table and a verdict on each term of the reward.

    Returns:
        Whether all terms score as they declare.

    Raises:
        Problems: rows cannot be read, or no response to one of them can be right.
    """
    rows = PlacedRows(_rows(job))
    job.check.run(job.reward.check)
    job.check.attempt(check_rows, rows, job.reward.check_row)
    job.check.end()
    if not rows:
        return True
    rows = _with_thoughts(job, rows, console)
    job.reward.leave_unscored()  # a finding, and not the end of the command
    with closing(job.reward) as reward:
        job.place_reward(job.join())
        texts = probes(reward, rows)
        with display(SINGLE_PROCESS, console) as shown, shown.progress("verify the reward", 2 * len(texts)) as show:
            certificates = certify(reward, rows, texts, show)
    console.print(_table(certificates))
    for line in _thoughts(reward, rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for name, certificate in certificates.items():
        console.print(verdict(not certificate.faults, f"reward.terms.{name}: {_verdict(certificate)}"))
        for fault in certificate.faults[:SHOWN]:
            where = f"{place(rows, fault.row)}: {fault.found}, expected {fault.expected}"
            console.print(f"    {where}: {head(fault.response)}", markup=False, highlight=False, soft_wrap=True)
    return not any(certificate.faults for certificate in certificates.values())


def _rows(job: Components) -> Iterator[tuple[str, Row]]:
    """The first `verify.rows` rows of each data set that the reward scores, with their places."""
    count, sets = job.run.verify.rows, dict[str, Rows | None]()
    if count and job.facts.scores:
        sets["data.train"] = job.check.attempt(_training_rows, job)
    if count and job.answers:
        fields = ("prompt", *job.reward.fields)
        sets |= {target.key: job.check.attempt(load, target, fields) for target in job.held_out.values()}
    for key, rows in sets.items():
        for number in range(min(count, len(rows or ()))):
            assert rows is not None
            yield f"{key} {place(rows, number)}", rows[number]


def _training_rows(job: Components) -> Rows:
    fields = sorted(job.needs)
    if job.run.data.streaming is None:
        return load(job.train, fields)
    rows: Rows = job.train.build(key=job.train.key).stream(fields).preview()
    return rows


def _with_thoughts(job: Components, rows: PlacedRows, console: Console) -> PlacedRows:
    """The rows with the entry `PROMPT_OPENS` where their rendered prompt ends inside of a thought."""
    if not all("prompt" in row for row in rows):
        return rows
    try:
        tokenizer = job.tokenizer.build()
        encoder = job.make_encoder(tokenizer, job.make_processor(tokenizer))
        entries = [encoder.thoughts.entry(prompt) for prompt in encoder.whole_prompts(rows)]
    except ValueError as error:  # the terms can be certified without a prompt
        console.print(redact(f"thoughts: the prompts are not rendered: {error}"), markup=False, soft_wrap=True)
        return rows
    return PlacedRows(zip(rows.places, map(or_, rows, entries), strict=True))


def _thoughts(reward: WeightedSum, rows: Rows) -> Iterator[str]:
    """How many prompts end inside of a thought, and how many responses to them the terms read in this way."""
    marks = Counter(row[PROMPT_OPENS] for row in rows if PROMPT_OPENS in row)
    opened = ", ".join(f"{count} with {mark}" for mark, count in marks.items())
    yield f"thoughts: {marks.total()} of {len(rows)} prompts end inside of one{opened and f' ({opened})'}"
    for name in reward.names:
        own = [(callers[name].reading, row) for row in rows if name in (callers := reward.callers_of(row))]
        begun = sum(reading.kind != "keep" and reading.opened(row) is not None for reading, row in own)
        if begun:
            yield f"    reward.terms.{name}: {begun} of {len(own)} responses begin inside of a thought"


def _table(certificates: Mapping[str, GraderCertificate]) -> Table:
    title = "certificate of the reward: texts with the score that is right, of those whose score is known"
    kinds: dict[Kind, str] = {"gold": "right answers", "other": "other answers", "empty": "empty"}
    if any(certificate.known["thought"] for certificate in certificates.values()):
        kinds["thought"] = "answers in a thought"
    table = titled_table(title, ["term"], ["rows", *kinds.values(), "same score twice"])
    for name, certificate in certificates.items():
        held = [_share(certificate, kind) for kind in kinds]
        table.add_row(name, str(certificate.rows), *held, f"{certificate.repeated}/{certificate.texts}")
    return table


def _share(certificate: GraderCertificate, kind: Kind) -> str:
    known = certificate.known[kind]
    return f"{certificate.held[kind]}/{known}" if known else "–"  # noqa: RUF001


def _verdict(certificate: GraderCertificate) -> str:
    if certificate.faults:
        return f"{len(certificate.faults)} of {certificate.texts} texts have another score than expected"
    if not certificate.known["gold"]:
        return "scores every text, twice the same; it states no right responses, so none are checked"
    others = "" if certificate.known["other"] else "; no row has another answer that must be wrong"
    return f"right responses have 1, others and the empty one do not{others}"
