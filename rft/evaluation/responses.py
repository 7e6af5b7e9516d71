"""Files of given responses, and the rows of held-out sets that they answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rft.batch.row_fields import PROMPT_OPENS
from rft.data.encode.media.folder import name_media
from rft.data.row_checks import identity, plain
from rft.data.rows.files import find_files, read_rows
from rft.data.rows.lazy import Row, Rows, place, subset
from rft.data.rows.sources import row_converter
from rft.evaluation.given import GivenAnswers

KEY = "evaluate.responses"
Columns = Mapping[str, str | None]


@dataclass(frozen=True)
class Record:
    """A row of a file of responses.

    Attributes:
        where: its file and line.
        set: the held-out set that it names; empty if it names none.
        key: what it has in common with the row that it answers.
        answers: its responses.
    """

    where: str
    set: str
    key: str
    answers: GivenAnswers


def read_responses(path: str, columns: Columns, match: str) -> list[Record]:
    """The records of `evaluate.responses`.

    Args:
        path: of a file, or a pattern.
        columns: {name here: name in the file} of `response`, `samples`, `tokens`, `set` and the field `match`; null is
            not read.
        match: the field that a record has in common with its row.

    Raises:
        ValueError: a file or a field is missing, or what should be a response is none; names file, line and key.
    """
    converter = row_converter(columns, None, "evaluate")
    unread = {name for name, source in columns.items() if source is None}
    found = []
    for file in find_files(path, KEY):
        convert = converter([match], Path(file).parent)
        for where, raw in read_rows(file, KEY):
            row = {name: value for name, value in convert(where, raw).items() if name not in unread}
            named = str(row.get("set") or "").removeprefix("eval/")
            found.append(Record(where, named, _key(row[match]), _answers(row, where)))
    if not found:
        raise ValueError(f"{KEY}={path}: the file holds no rows")
    return found


def _key(value: Any) -> str:
    simple = plain(name_media({"value": value})["value"])
    return simple if isinstance(simple, str) else identity(simple)


def _answers(row: Row, where: str) -> GivenAnswers:
    samples = row.get("samples")
    if samples is not None and not isinstance(samples, list):
        raise ValueError(
            f"{where}: the field of the sampled responses is {samples!r:.80}, not a list; name another with "
            "evaluate.columns.samples, or set it to null"
        )
    response, tokens, opens = None, None, row.get(PROMPT_OPENS)
    if (single := row.get("response")) is not None:
        if isinstance(single, list) and len(single) == 1:
            (single,) = single
        response = _text(single, where, "response")
        tokens = (single if isinstance(single, Mapping) else row).get("tokens")
        opens = single.get(PROMPT_OPENS, opens) if isinstance(single, Mapping) else opens
    if response is None and not samples:
        known = ", ".join(row)
        raise ValueError(
            f"{where}: no response (fields: {known}); name the field with +evaluate.columns.response=<name in the "
            "file>, or a list of sampled responses with +evaluate.columns.samples=<name in the file>"
        )
    texts = [_text(sample, where, "samples") for sample in samples or ()]
    marks = [one.get(PROMPT_OPENS) if isinstance(one, Mapping) else row.get(PROMPT_OPENS) for one in samples or ()]
    tokens = tokens if isinstance(tokens, int) else None
    return GivenAnswers(response, tokens, texts, opens, marks if any(marks) else [])


def _text(value: Any, where: str, name: str) -> str:
    """The text of a response, which is a text or an object with its `response` or `text`."""
    inner = value.get("response", value.get("text")) if isinstance(value, Mapping) else value
    if not isinstance(inner, str):
        raise ValueError(f"{where}: {value!r:.80} is no response; name another field with evaluate.columns.{name}")
    return inner


def match_responses(
    sets: Mapping[str, Rows],
    records: Sequence[Record],
    match: str,
    samples: int,
    unanswered: Literal["error", "skip"],
) -> tuple[dict[str, Rows], dict[str, list[GivenAnswers]]]:
    """The rows that have responses, and their responses, by the names of their sets.

    Several records of one row are its samples. Rows that are equal in `match` take as many records in their order.

    Args:
        sets: the held-out rows; a record that names another set is left out.
        match: a field of the rows.
        samples: of each row.
        unanswered: what becomes of rows without a response.

    Raises:
        ValueError: a record answers no row or more than one, a row has no response, or the responses of two rows differ
            in kind or number; names the places and the cure.
    """
    by_row = _by_row(sets, [record for record in records if record.set in ("", *sets)], match)
    rows, answers = dict[str, Rows](), dict[str, list[GivenAnswers]]()
    for name, all_rows in sets.items():
        missing = [number for number in range(len(all_rows)) if (name, number) not in by_row]
        if missing and unanswered == "error":
            raise ValueError(
                f"{KEY}: {len(missing)} of the {len(all_rows)} rows of data.eval.{name} have no response, the first is "
                f"{place(all_rows, missing[0])}; add them, or set evaluate.unanswered=skip"
            )
        if numbers := [number for number in range(len(all_rows)) if (name, number) in by_row]:
            rows[name] = subset(all_rows, numbers)
            answers[name] = [_combined(by_row[name, number], samples) for number in numbers]
    if not rows:
        raise ValueError(f"{KEY}: no row of data.eval has a response; choose the sets that were answered")
    _check_alike([records for _, records in sorted(by_row.items())])
    return rows, answers


def _by_row(sets: Mapping[str, Rows], records: Sequence[Record], match: str) -> dict[tuple[str, int], list[Record]]:
    """The records of each row, by its set and index."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, rows in sets.items():
        for number, row in enumerate(rows):
            if match not in row:
                raise ValueError(
                    f"{place(rows, number)}: the row has no field {match!r}, which a response must have in common with "
                    "it; set evaluate.match to a field of both"
                )
            places.setdefault(_key(row[match]), []).append((name, number))
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.set, record.key), []).append(record)
    found: dict[tuple[str, int], list[Record]] = {}
    for (named, key), group in groups.items():
        answered = [pair for pair in places.get(key, []) if named in ("", pair[0])]
        if not answered:
            raise ValueError(
                f"{group[0].where}: no row of data.eval has this {match}: {key!r:.80}; remove the response, add the "
                "row, or match by another field (evaluate.match)"
            )
        if len(answered) not in (1, len(group)):
            raise ValueError(
                f"{group[0].where}: {len(answered)} rows of data.eval have this {match}, and {len(group)} responses: "
                f"{key!r:.80}; set evaluate.match to a field that differs between the rows, such as an id"
            )
        for pair, record in zip(answered * (len(group) if len(answered) == 1 else 1), group, strict=True):
            found.setdefault(pair, []).append(record)
    return found


def _combined(records: Sequence[Record], samples: int) -> GivenAnswers:
    """The responses of one row: those of its record, or the responses of several records as samples."""
    first, answers = records[0].where, records[0].answers
    if len(records) > 1:
        texts = [record.answers.response for record in records if record.answers.response is not None]
        if len(texts) < len(records) or any(record.answers.samples for record in records):
            raise ValueError(f"{first}: {len(records)} lines answer one row; each must then have a single response")
        opens = [record.answers.prompt_opens for record in records]
        answers = GivenAnswers(None, None, texts, None, opens if any(opens) else [])
    if len(answers.samples) != samples:
        raise ValueError(
            f"{first}: {len(answers.samples)} sampled responses of a row, but eval.samples={samples}; set "
            f"eval.samples={len(answers.samples)}, or +evaluate.columns.samples=null to score the single response alone"
        )
    return answers


def _check_alike(groups: Sequence[Sequence[Record]]) -> None:
    """Raises a ValueError unless all rows have a single response, or none has."""
    single = [group for group in groups if len(group) == 1 and group[0].answers.response is not None]
    if 0 < len(single) < len(groups):
        other = next(group for group in groups if group not in single)
        raise ValueError(
            f"{other[0].where}: this row has samples alone, and that of {single[0][0].where} has a single response; "
            "write the same fields into every line"
        )
