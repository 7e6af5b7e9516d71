"""The part of `mode=verify` that certifies the terms of the reward on rows of the run's data sets."""

from collections.abc import Iterator, Mapping
from contextlib import closing

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rft.data.rows.lazy import PlacedRows, Row, Rows, load, place
from rft.distributed import SINGLE_PROCESS
from rft.modes.model import display
from rft.reward.call import head
from rft.reward.certificate.grader import GraderCertificate, Kind, certify, probes
from rft.setup.components import Components
from rft.setup.row_checks import check_rows

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
    job.reward.leave_unscored()  # a finding, and not the end of the command
    with closing(job.reward) as reward:
        job.place_reward(job.join())
        texts = probes(reward, rows)
        with display(SINGLE_PROCESS, console) as shown, shown.progress("verify the reward", 2 * len(texts)) as show:
            found = certify(reward, rows, texts, show)
    console.print(_table(found))
    for name, certificate in found.items():
        mark = ("✗ ", "bold red") if certificate.faults else ("✓ ", "green")
        console.print(Text.assemble(mark, f"reward.terms.{name}: {_verdict(certificate)}"))
        for fault in certificate.faults[:SHOWN]:
            where = f"{place(rows, fault.row)}: {fault.found}, expected {fault.expected}"
            console.print(f"    {where}: {head(fault.response)}", markup=False, highlight=False, soft_wrap=True)
    return not any(certificate.faults for certificate in found.values())


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


def _table(found: Mapping[str, GraderCertificate]) -> Table:
    title = "certificate of the reward: texts with the score that is right, of those whose score is known"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    table.add_column("term", overflow="fold")
    for column in ("rows", "right answers", "other answers", "empty", "same score twice"):
        table.add_column(column, justify="right")
    for name, certificate in found.items():
        held = [_share(certificate, kind) for kind in ("gold", "other", "empty")]
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
