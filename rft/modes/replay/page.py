"""The page of a replayed step: the rows as text, each token coloured by how much its gradient differs."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rft.logger.history import short
from rft.modes.replay.compare import TokenChange
from rft.report.page import page

SHOWN = 64  # rows
FAINTEST, STRONGEST = 15, 60  # percent of the colour; the text stays legible on it


@dataclass(frozen=True)
class RowTexts:
    """The texts of the rows of a step.

    Attributes:
        ids: token ids of each row, by its number.
        spell: the text of token ids.
    """

    ids: Mapping[int, Sequence[int]]
    spell: Callable[[Sequence[int]], str]

    def token(self, row: int, position: int) -> str:
        """The text of one token."""
        return self.spell([self.ids[row][position]])


def rows_page(title: str, tokens: Sequence[TokenChange], texts: RowTexts) -> str:
    """A page with the rows whose tokens differ in the first update that differs, the largest difference first.

    Args:
        title: of the page.
        tokens: those whose gradient differs, the largest difference first.
        texts: of the rows.
    """
    first = min((token.update for token in tokens), default=0)
    found: dict[int, dict[int, TokenChange]] = {}
    for token in tokens:
        if token.update == first:
            found.setdefault(token.row, {})[token.position] = token
    largest = max((abs(t.command - t.run) for by_place in found.values() for t in by_place.values()), default=0.0)
    rows = [
        f'<section class="card"><small>row {row}</small><div class="text">'
        f"{''.join(_spans(row, by_place, largest, texts))}</div></section>"
        for row, by_place in list(found.items())[:SHOWN]
    ]
    note = (
        "Green: with the command, an update raises the probability of the token more than with the run, or lowers it "
        "less; orange: the other way round. Point at a token for its numbers."
    )
    subtitle = (
        f"rows that differ in update {first}, the first that differs: {len(found)}" if found else "no row differs"
    )
    return page(title, subtitle, [f'<p class="note">{note}</p>', *rows] if rows else [])


def _spans(row: int, tokens: Mapping[int, TokenChange], largest: float, texts: RowTexts) -> Iterable[str]:
    """The tokens of a row as HTML."""
    for position in range(len(texts.ids[row])):
        text = html.escape(texts.token(row, position))
        if position not in tokens:
            yield text
            continue
        token = tokens[position]
        difference = token.command - token.run
        colour = "--good" if difference < 0 else "--bad"
        share = FAINTEST + (STRONGEST - FAINTEST) * abs(difference) / largest
        numbers = f"run {short(token.run)}, command {short(token.command)}, ratio {short(token.ratio)}"
        style = f"background: color-mix(in srgb, var({colour}) {share:.0f}%, transparent)"
        yield f'<span title="{numbers}" style="{style}">{text}</span>'
