"""The generated parts of the pages on algorithms: what the registries, the yamls and the measured results say.

A page marks such a part with `<!-- atlas: facts -->` and `<!-- /atlas -->`; all else in it is written by hand.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reference.atlas_tables import (
    CONFIG,
    REGISTRIES,
    codes,
    corrections_table,
    mark,
    numbers,
    options_table,
    papers,
    remark,
    resolved,
    rules,
    say,
    selected,
    spell,
    table,
    what,
)
from rft.algorithm.roles import ROLES
from rft.registry import Plugin
from rft.report.chart import Curve, draw
from rft.setup.assembly import Job

ROOT = CONFIG.parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / "algorithms" / "results.json"
ALWAYS = {"loss_mask", "group", "scores"}  # columns of every sampled batch
COLUMNS = ("advantage", "loss", "aggregation")  # of the table of algorithms
UNKNOWN = "Not measured yet."
SVG = 'xmlns="http://www.w3.org/2000/svg"'
STYLE = (
    ".grid{stroke:#8884}.tick{font:10.5px system-ui,sans-serif;fill:#888}.cursor{visibility:hidden}"
    ".line{fill:none;stroke:var(--k);stroke-width:1.9}.raw{fill:none;stroke:var(--k);opacity:.3}circle{fill:var(--k)}"
    ".k0{--k:#2563eb}.k1{--k:#15935a}.k2{--k:#8b3fd9}.k3{--k:#ea6a0a}"
)


def write_pages(texts: Mapping[Path, str]) -> None:
    """Writes every page and curve that is not current."""
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def pages() -> dict[Path, str]:
    """Every page with its generated parts as they should be, and every curve.

    Raises:
        ValueError: a page has a part that nothing generates.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"settings": [], "algorithms": {}}
    measured = results["algorithms"]
    atlas = [Algorithm.read(name) for name in algorithms()]
    usual = Algorithm.read(resolved()["algorithm"]["name"])
    page = DOCS / "algorithms.md"
    blocks = {group: options_table(group) for group in marked(page) if group in REGISTRIES}
    blocks |= {"correction": corrections_table(), "algorithms": algorithms_table(atlas, usual)}
    blocks |= {"accuracy": accuracy_table(measured), "settings": settings(results)}
    found = {page: filled(page, blocks)}
    for algorithm in atlas:
        page, entry = DOCS / "algorithms" / f"{algorithm.name}.md", measured.get(algorithm.name)
        blocks = {"facts": facts(algorithm, usual), "metrics": UNKNOWN, "measured": UNKNOWN}
        if entry is not None:
            blocks |= {"metrics": metrics_table(algorithm.name, measured), "measured": curve(algorithm.name, entry)}
            found[page.with_suffix(".svg")] = picture(algorithm.name, entry["runs"])
        found[page] = filled(page, blocks, skeleton(algorithm.name))
    return found


class Algorithm(NamedTuple):
    """An algorithm by its yaml.

    Attributes:
        name: of the yaml.
        job: the default run with it.
        selected: the option of every group.
    """

    name: str
    job: Job
    selected: dict[str, Any]

    @classmethod
    def read(cls, name: str) -> "Algorithm":
        """Composes and checks it."""
        return cls(name, Job(resolved(f"algorithm={name}")), selected(name))

    @property
    def papers(self) -> str:
        """Links."""
        return papers(remark(CONFIG / "algorithm" / f"{self.name}.yaml"))


def algorithms() -> list[str]:
    """The name of every algorithm."""
    return sorted(path.stem for path in (CONFIG / "algorithm").glob("[!_]*.yaml"))


def marked(page: Path) -> list[str]:
    """The names of the generated parts of a page."""
    return re.findall(r"^<!-- atlas: (\w+) -->$", page.read_text(), re.MULTILINE)


def filled(page: Path, blocks: dict[str, str], new: str = "") -> str:
    """The page (or a new one) with the text between its markers replaced."""
    text = page.read_text() if page.exists() else new

    def block(found: re.Match) -> str:
        if found[1] not in blocks:
            raise ValueError(f"{page}: no part is called {found[1]!r} (known: {', '.join(blocks)})")
        return f"<!-- atlas: {found[1]} -->\n\n{blocks[found[1]]}\n\n<!-- /atlas -->"

    return re.sub(r"<!-- atlas: (\w+) -->\n.*?<!-- /atlas -->", block, text, flags=re.DOTALL)


def skeleton(name: str) -> str:
    """A page whose text is still to be written: the remark of the yaml stands in its place."""
    parts = {"facts": "Parts", "metrics": "Metrics", "measured": "Measured"}
    return f"# {name}\n\n{remark(CONFIG / 'algorithm' / f'{name}.yaml')}\n" + "".join(
        f"\n## {title}\n\n<!-- atlas: {part} -->\n<!-- /atlas -->\n" for part, title in parts.items()
    )


def parts(job: Job) -> list[tuple[str, Plugin]]:
    """(yaml key below `algorithm`, function) of everything with a formula that an algorithm is made of."""
    algorithm = job.algorithm
    found: list[tuple[str, Plugin | None]] = [("advantage", algorithm.advantage)]
    found += [(f"terms.{t.name}" if i else "loss", t.plugin) for i, t in enumerate(algorithm.policy.terms)]
    found += [("aggregation", algorithm.aggregation), ("gradient_mask", algorithm.policy.mask)]
    found += [(f"shaping.{plugin.name}", plugin) for plugin in algorithm.shaping.values()]
    found += [(f"{role}_loss", objective.terms[0].plugin) for role, objective in algorithm.learners.items()]
    return [(key, plugin) for key, plugin in found if plugin is not None]


def models_beside(job: Job) -> list[str]:
    """The models that an algorithm needs beside the policy."""
    return [role.key for role in ROLES if role.writes(job.algorithm.reads())]


def beside(algorithm: Algorithm, usual: Algorithm) -> list[str]:
    """The options and keys by which an algorithm differs from the default one, beside those with a column."""
    config, default = (one.job.config["algorithm"] for one in (algorithm, usual))
    words = {key: value for key, value in algorithm.selected.items() if value != usual.selected.get(key)}
    plain = {key: value for key, value in config.items() if isinstance(value, int | float) or key == "pick"}
    words |= {key: value for key, value in plain.items() if value != default[key]}
    return [f"`{key}={spell(value)}`".replace('"', "") for key, value in words.items() if key not in COLUMNS]


def reads(job: Job) -> list[str]:
    """Columns that an algorithm needs beside those that every batch has, its own not counted."""
    written = {column for _, _, columns in job.algorithm.stages() for column in columns}
    return sorted(job.algorithm.reads() - written - ALWAYS)


def algorithms_table(atlas: list[Algorithm], usual: Algorithm) -> str:
    """One line per algorithm."""
    rows = []
    for algorithm in atlas:
        gradients = [say(vars(plugin.facts)["gradient"]) for key, plugin in parts(algorithm.job) if key in COLUMNS[:2]]
        row = [f"[`{algorithm.name}`](algorithms/{algorithm.name}.md)"]
        row += [f"`{algorithm.selected[group]}`" for group in COLUMNS]
        row += [" ".join(beside(algorithm, usual)), codes(reads(algorithm.job)), " · ".join(filter(None, gradients))]
        rows.append([*row, algorithm.papers])
    heads = ["`algorithm=`", "advantage", "loss", "aggregation", "other options", "reads", "gradient", "paper"]
    return table(heads, rows)


def facts(algorithm: Algorithm, usual: Algorithm) -> str:
    """The parts of an algorithm with formulas and numbers, the columns it reads, and its gradient."""
    job = algorithm.job
    config = job.config["algorithm"]
    rows, gradients = [], []
    for key, plugin in parts(job):
        node = config
        for word in key.split("."):
            node = node[word]
        group = key.split(".")[0]
        rows.append([f"`{key}`", f"`{plugin.name}`", numbers(node), what(REGISTRIES[group], plugin.name)])
        stated = vars(plugin.facts).get("gradient")
        if stated is not None:
            note = f": {mark(stated.note)}" if stated.note else ""
            gradients.append(f"`{plugin.name}` {say(stated)}{note}")
    if config["correction"] is not None:
        rows.append(["`correction`", "", f"`anchor={config['correction']['anchor']}`", rules(config["correction"])])
    if config["reward_kl"] is not None:
        rows.append(
            ["`reward_kl`", "", numbers(config["reward_kl"]), "coef times the estimate is subtracted from the reward"]
        )
    source = {key: value for key, value in config["source"].items() if key != "_target_"}
    rows.append(["`source`", f"`{job.source.factory.__name__}`", numbers(source), ""])
    models = models_beside(job)
    different = " ".join(beside(algorithm, usual)) or "only the functions above"
    lines = [
        f"- **Options that differ from the default:** {different}.",
        f"- **Columns read:** {codes(reads(job)) or 'only those of every batch'}.",
        f"- **Models beside the policy:** {', '.join(models) or 'none'}.",
        f"- **Gradient:** {'; '.join(gradients)}.",
    ]
    if algorithm.papers:
        lines.insert(0, f"- **Paper:** {algorithm.papers}.")
    return table(["part", "function", "numbers", "what it computes"], rows) + "\n\n" + "\n".join(lines)


def metrics_table(name: str, measured: dict[str, Any]) -> str:
    """What an algorithm logs beyond what all that sample do, with the words of the page on metrics."""
    sampled = [set(entry["metrics"]) for entry in measured.values() if "reward/mean" in entry["metrics"]]
    rows = []
    for metric in sorted(set(measured[name]["metrics"]) - set.intersection(*sampled)):
        meaning = [text for pattern, text in meanings() if re.fullmatch(pattern, metric)]
        if not meaning:
            raise ValueError(f"docs/metrics.md says nothing of {metric!r}, which {name} logs; add a row")
        rows.append([f"`{metric}`", meaning[0]])
    if not rows:
        return "None in addition to [the metrics of every algorithm](../metrics.md)."
    return "In addition to [the metrics of every algorithm](../metrics.md):\n\n" + table(["name", "what it is"], rows)


def meanings() -> list[tuple[str, str]]:
    """(pattern of a name, meaning) of every row of the page on metrics, as the page of an algorithm says it."""
    text = (DOCS / "metrics.md").read_text().replace("](", "](../").replace("](../http", "](http")
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)
    return [(re.sub(r"<\w+>", r"[^/]+", re.escape(name).replace(r"\<", "<")), text) for name, text in rows]


def settings(results: dict[str, Any]) -> str:
    """How the results were measured."""
    return f"Settings: `{' '.join(results['settings'])}`, torch {results.get('versions', {}).get('torch', '')}."


def accuracy_table(measured: dict[str, Any]) -> str:
    """Accuracy of every algorithm before and after, mean and every seed."""
    rows = []
    for name, entry in sorted(measured.items()):
        before, after = (ends(entry["runs"], place) for place in (0, -1))
        seeds = " ".join(f"{value:.2f}" for value in after)
        own = f" `{' '.join(entry['overrides'])}`" if entry["overrides"] else ""
        shown = [f"{sum(values) / len(values):.2f}" for values in (before, after)]
        rows.append([f"[`{name}`](algorithms/{name}.md){own}", *shown, seeds])
    return table(["`algorithm=`", "before", "after", "each seed"], rows) if rows else UNKNOWN


def ends(runs: dict[str, Any], place: int) -> list[float]:
    """The first or last accuracy of every seed."""
    return [run["accuracy"][place][1] for _, run in sorted(runs.items())]


def curve(name: str, entry: dict[str, Any]) -> str:
    """The picture, and its numbers in words."""
    before, after = (", ".join(f"{value:.2f}" for value in ends(entry["runs"], place)) for place in (0, -1))
    own = f", with `{' '.join(entry['overrides'])}`" if entry["overrides"] else ""
    rewarded = any(run["reward"] for run in entry["runs"].values())
    reward = "; orange: the mean reward of the training samples over the seeds" if rewarded else ""
    return (
        f"![accuracy{' and reward' if rewarded else ''} by step]({name}.svg)\n\n"
        f"Held-out accuracy of seeds {', '.join(sorted(entry['runs']))} (dots): {before} before, {after} after the "
        f"last step{reward}. Measured on the built-in task{own}; [settings](../algorithms.md#measured)."
    )


def picture(name: str, runs: dict[str, Any]) -> str:
    """Accuracy of every seed and the mean reward over seeds, as a file of SVG."""
    curves = [
        Curve(f"seed {seed}", [tuple(p) for p in run["accuracy"]], dotted=True) for seed, run in sorted(runs.items())
    ]
    rewards = [dict(map(tuple, run["reward"])) for run in runs.values()]
    if steps := sorted(set.intersection(*map(set, rewards))):
        curves.append(Curve("reward", [(step, sum(r[step] for r in rewards) / len(rewards)) for step in steps]))
    card = draw(name, curves)
    drawing = card[card.index("<svg") : card.index("</svg>")]
    return drawing.replace("<svg", f"<svg {SVG}", 1).replace("><", f"><style>{STYLE}</style><", 1) + "</svg>\n"
