"""The page with the coloured rows."""

from rft.modes.replay.compare import TokenChange
from rft.modes.replay.page import RowTexts, rows_page


def spell(ids):
    return "".join("<ab"[one] for one in ids)


def test_the_tokens_of_the_first_update_that_differs_are_coloured():
    """Row 7 is `<ab`: in update 2 the gradient of `a` rises by 0.4, and that of `b` falls by 0.2, half as much."""
    tokens = [
        TokenChange(3, 9, 0, 1.0, 0.0, 1.0),
        TokenChange(2, 7, 1, 1.1, -0.4, 0.0),
        TokenChange(2, 7, 2, 1.0, 0.1, -0.1),
    ]
    text = rows_page("step 4 of a & b", tokens, RowTexts({7: [0, 1, 2], 9: [1]}, spell))
    assert "step 4 of a &amp; b" in text and "rows that differ in update 2, the first that differs: 1" in text
    orange = "background: color-mix(in srgb, var(--bad) 60%, transparent)"
    green = "background: color-mix(in srgb, var(--good) 38%, transparent)"
    assert f'&lt;<span title="run -0.4, command 0, ratio 1.1" style="{orange}">a</span>' in text
    assert f'<span title="run 0.1, command -0.1, ratio 1" style="{green}">b</span></div>' in text
    assert "row 9" not in text


def test_a_page_without_differences():
    assert "no row differs" in rows_page("step 4", [], RowTexts({0: [1]}, spell))
