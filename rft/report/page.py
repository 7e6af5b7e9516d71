"""The frame of a self-contained HTML page: inline style and script, no network, light and dark, screen and print."""

import base64
import hashlib
import html
from collections.abc import Sequence

LONGEST = 1600  # characters of a text that a page shows

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f3; --card: #fff; --ink: #1d2026; --soft: #667085; --rule: #e4e4de;
  --grid: #ecece7; --band: #64748b12; --good: #15803d; --bad: #c2410c;
  --c0: #2563eb; --c1: #ea6a0a; --c2: #15935a; --c3: #8b3fd9; --c4: #d62f6e; --c5: #0e93ad;
  --c6: #a3790b; --c7: #6b7280; }
@media screen and (prefers-color-scheme: dark) { :root { --page: #101216; --card: #181b21; --ink: #e7e9ee;
  --soft: #98a1b0; --rule: #2a2f38; --grid: #242932; --band: #94a3b814; --good: #4ade80; --bad: #fb923c;
  --c0: #6ea0ff; --c1: #ff9f4a; --c2: #45cf8d; --c3: #bd8bff; --c4: #ff7aa8; --c5: #42cbe2;
  --c6: #e2b640; --c7: #a3acba; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 34px 0 12px; }
p.sub, .note { color: var(--soft); margin: 2px 0 0; } .note { font-size: 13px; margin-top: 8px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; margin: 0;
  break-inside: avoid; min-width: 0; }
.tiles, .charts { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); margin-top: 20px; }
.tile small { color: var(--soft); display: block; overflow-wrap: anywhere; }
.tile strong { font-size: 25px; font-variant-numeric: tabular-nums; font-weight: 640; }
.tile .up { color: var(--good); } .tile .down { color: var(--bad); } .tile i { font-style: normal; color: var(--soft); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.charts.large { grid-template-columns: repeat(auto-fit, minmax(min(360px, 100%), 1fr)); }
.charts.wide { grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
figcaption { display: flex; justify-content: space-between; overflow-wrap: anywhere; }
figcaption .at { font-style: normal; color: var(--soft); white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12.5px; color: var(--soft); min-height: 20px; }
.legend em, td em { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px;
  background: var(--k); }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; font-weight: 600; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg .grid { stroke: var(--grid); } svg .tick, svg .stage { font-size: 10.5px; fill: var(--soft); }
svg .band { fill: var(--band); }
svg .line { fill: none; stroke: var(--k); stroke-width: 1.9; stroke-linejoin: round; }
svg .raw { fill: none; stroke: var(--k); stroke-width: 1; opacity: .28; } svg .error { stroke: var(--k); opacity: .6; }
svg .spread { fill: var(--k); opacity: .15; }
svg circle { fill: var(--k); stroke: var(--card); } svg path.dash { stroke-dasharray: 5 3; }
svg .cursor { stroke: var(--soft); visibility: hidden; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; } td, th { padding: 5px 12px 5px 0; vertical-align: top; }
tr + tr td { border-top: 1px solid var(--rule); } td.n, th.n { text-align: right; } .scroll { overflow-x: auto; }
td { white-space: nowrap; } td small { display: block; white-space: normal; max-width: 60ch; }
td.n small { color: var(--soft); white-space: nowrap; }
a { color: var(--c0); } .failed { color: var(--bad); font-weight: 600; }
details.card + details.card, .note + .card, section.card { margin-top: 10px; }
summary { cursor: pointer; font-weight: 600; }
summary span { font-weight: 400; color: var(--soft); }
.sample { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr) 74px; gap: 4px 18px; padding: 10px 0;
  border-top: 1px solid var(--rule); } .sample:first-of-type { margin-top: 8px; }
.sample small { display: block; color: var(--soft); } .sample .facts { grid-column: 1 / -1; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
.turn { margin: 0 0 6px; padding-left: 9px; border-left: 3px solid transparent; }
.turn.trains { border-color: var(--c2); } .turn .call { font: 13px/1.5 ui-monospace, monospace; color: var(--c3);
  overflow-wrap: anywhere; }
.medium { display: inline-block; vertical-align: top; max-width: 100%; margin: 4px 8px 6px 0; }
img.medium { max-height: 300px; border: 1px solid var(--rule); border-radius: 6px; background: #fff; }
img.tiny { width: 128px; image-rendering: pixelated; }
.medium[controls] { width: 300px; height: 40px; }
.score { align-self: start; justify-self: end; border-radius: 7px; padding: 1px 9px; font-weight: 650; color: #fff;
  font-variant-numeric: tabular-nums; }
pre { margin: 10px 0 0; overflow-x: auto; font: 12.5px/1.5 ui-monospace, monospace; } pre .key { color: var(--c0); }
pre .remark { color: var(--soft); }
@media (max-width: 640px) { main { padding: 18px 12px 40px; } .sample { grid-template-columns: minmax(0, 1fr) 74px; }
  .sample .question { grid-column: 1 / -1; } h1 { font-size: 22px; } }
@media print { body { background: #fff; font-size: 12px; } main { max-width: none; padding: 0; }
  .charts { grid-template-columns: repeat(2, 1fr); } }
""" + "".join(f".k{i} {{ --k: var(--c{i}); }} " for i in range(8))

SCRIPT = """
const charts = [...document.querySelectorAll('.chart')].map(node => ({
  node, svg: node.querySelector('svg'), cursor: node.querySelector('.cursor'), at: node.querySelector('.at'),
  now: [...node.querySelectorAll('.now')], ...JSON.parse(node.dataset.chart) }));
const format = value => Math.abs(value) >= 1e5 ? value.toExponential(3) : String(+value.toPrecision(4));
const nearest = (points, step) => points.length ?
  points.reduce((a, b) => Math.abs(b[0] - step) <= Math.abs(a[0] - step) ? b : a) : null;
function point(step) {
  for (const chart of charts) {
    const found = chart.curves.map(points => nearest(points, step));
    const [low, high, left, right] = chart.x;
    if (step < low || step > high) { clear(chart); continue; }
    const here = found.filter(Boolean).reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a)[0];
    const x = left + (here - low) / (high - low) * (right - left);
    chart.cursor.setAttribute('x1', x); chart.cursor.setAttribute('x2', x);
    chart.cursor.style.visibility = 'visible'; chart.at.textContent = 'step ' + here;
    chart.now.forEach((node, i) => { if (found[i]) node.textContent = format(found[i][1]); });
  }
}
function clear(chart) {
  chart.cursor.style.visibility = 'hidden'; chart.at.textContent = '';
  chart.now.forEach(node => { node.textContent = node.dataset.last; });
}
for (const chart of charts) {
  chart.svg.addEventListener('pointermove', event => {
    const box = chart.svg.getBoundingClientRect(), [low, high, left, right] = chart.x;
    const x = (event.clientX - box.left) / box.width * chart.svg.viewBox.baseVal.width;
    point(low + (Math.min(Math.max(x, left), right) - left) / (right - left) * (high - low));
  });
  chart.svg.addEventListener('pointerleave', () => charts.forEach(clear));
}
for (const node of document.querySelectorAll('[data-same]'))
  node.src = document.getElementById(node.dataset.same).src;
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(node => { node.open = true; }));
"""


def cut(text: str, most: int) -> str:
    """A text, or its first `most` characters and the number of the others."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def page(title: str, subtitle: str, body: Sequence[str]) -> str:
    """A complete HTML document.

    Args:
        title, subtitle: plain text; escaped here.
        body: HTML fragments, already escaped.
    """
    # only the page's own script may run: unescaped text could not execute
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; media-src data:"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f'<body><main><h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>\n'
        + "\n".join(body)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )
