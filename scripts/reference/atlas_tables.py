"""Tables of the options of an algorithm, made of their yamls and of what their functions say of themselves."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

import rft
from rft.algorithm import ADVANTAGES, AGGREGATIONS, GRADIENT_MASKS, LOSSES, SHAPINGS, Gradient
from rft.registry import Registry

CONFIG = Path(rft.__file__).parent / "config"
REGISTRIES: dict[str, Registry] = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "terms": LOSSES,
    "critic_loss": LOSSES,
    "prm_loss": LOSSES,
    "gradient_mask": GRADIENT_MASKS,
    "aggregation": AGGREGATIONS,
    "shaping": SHAPINGS,
}
NAMED = ("terms", "shaping")  # groups of which several are chosen, each under a name
GROUP = 8  # rows of a group in what is said of a factor
OPEN = re.compile(r"[*|<]")  # what Markdown would take for its own


def resolved(*overrides: str) -> dict[str, Any]:
    """A config as the command line composes it, in plain containers."""
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return plain(compose("main", list(overrides)))


def selected(name: str) -> dict[str, Any]:
    """The option that an algorithm's yaml, or one that it builds on, selects of every group."""
    found: dict[str, Any] = {}
    body: Any = OmegaConf.to_container(OmegaConf.load(CONFIG / "algorithm" / f"{name}.yaml"))
    for entry in body["defaults"]:
        if isinstance(entry, Mapping):
            for group, option in entry.items():
                found[group.removeprefix("override ").split("@")[0].removeprefix("/")] = option
        elif entry != "_self_":
            found |= selected(entry)
    return found


def plain(node: Any) -> dict[str, Any]:
    """A node of a config with nothing left to resolve."""
    found = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def options(group: str) -> dict[str, dict[str, Any]]:
    """The option files of a group of `algorithm/`, each resolved; that which takes the part out is left out."""
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        main = compose("main")
    found = {}
    for path in sorted((CONFIG / "algorithm" / group).glob("*.yaml")):
        if path.stem != "none":
            with open_dict(main):
                main.algorithm[group] = option(path)
            found[path.stem] = plain(main.algorithm[group])
    return found


def option(path: Path) -> Any:
    """An option file, on top of those that it names in its defaults."""
    node = OmegaConf.load(path)
    assert isinstance(node, DictConfig)
    bases = [option(path.with_stem(name)) for name in node.pop("defaults", []) if name != "_self_"]
    return OmegaConf.merge(*bases, node)


def options_table(group: str) -> str:
    """The option files of a group with what their functions compute, read and prove."""
    registry = REGISTRIES[group]
    rows = []
    for name, node in options(group).items():
        inner = next(iter(node.values())) if group in NAMED else node
        plugin = registry.build({key: value for key, value in inner.items() if key != "coef"}, f"algorithm.{group}")
        facts = vars(plugin.facts)
        cells = {
            f"`algorithm/{group}=`": f"`{name}`",
            "what it computes": what(registry, plugin.name),
            "numbers": numbers(inner),
        }
        if "reads" in facts:
            cells["reads"] = codes(sorted(facts["reads"]))
        if "gradient" in facts:
            cells["gradient"] = say(facts["gradient"])
        rows.append(cells)
    return table(list(rows[0]), [list(cells.values()) for cells in rows])


def corrections_table() -> str:
    """The corrections with their anchors and rules."""
    rows = [[f"`{name}`", f"`{node['anchor']}`", rules(node)] for name, node in options("correction").items()]
    return table(["`algorithm/correction=`", "`anchor`", "rules"], rows)


def rules(node: Mapping[str, Any]) -> str:
    """The rules of a correction in words: `sequence geometric ratio in [0.999, 1.001], else mask`."""
    parts = []
    for rule in node["rules"].values():
        bounds = [side if rule[side] is None else f"{rule[side]:g}" for side in ("low", "high")]
        low, high = ("-∞" if bounds[0] == "low" else bounds[0]), ("∞" if bounds[1] == "high" else bounds[1])
        words = [rule["level"], rule["aggregate"] or "", rule["metric"].replace("_", " ")]
        sign = "" if rule["sign"] == "any" else f" (A {rule['sign']})"
        parts.append(f"{' '.join(filter(None, words))} in [{low}, {high}], else {rule['action']}{sign}")
    return "; ".join(parts) + ("; weights divided by their mean" if node["normalize"] else "")


def what(registry: Registry, name: str) -> str:
    """The first paragraph of a function's docstring, as Markdown takes it."""
    paragraph = (registry.function(name).__doc__ or "").strip().split("\n\n")[0]
    return mark(re.sub(r"\s+", " ", paragraph))


def mark(text: str) -> str:
    """Text for a cell: signs that Markdown takes for its own are escaped, outside of `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part.replace("|", "\\|") if part[:1] == "`" else OPEN.sub(r"\\\g<0>", part) for part in parts)


def say(gradient: Gradient | None) -> str:
    """A gradient property in a few words: `cosine 0.98`, `0.875 of it at n = 8`."""
    if gradient is None:
        return ""
    words: str = {"none": "zero"}.get(gradient.relation, gradient.relation)
    if gradient.relation == "scaled" and gradient.factor is not None:
        words = f"{gradient.factor(GROUP):.3g} of it"
        words += f" at n = {GROUP}" if gradient.factor(GROUP) != gradient.factor(GROUP + 1) else ""
    elif gradient.relation == "near":
        words = "near" if gradient.cosine is None else f"cosine {gradient.cosine:g}"
    return words if gradient.target == "reward" else f"{words} ({gradient.target})"


def numbers(node: Mapping[str, Any]) -> str:
    """The options of a yaml node as one reads them on a command line."""
    parts = []
    for key, value in node.items():
        if isinstance(value, Mapping):
            parts.append(f"`{key}`: {value.get('name', '')} ({numbers(value)})".replace(":  (", ": ("))
        elif key != "name":
            parts.append(f"`{key}={spell(value)}`")
    return " ".join(parts)


def spell(value: Any) -> str:
    """A value as yaml has it."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value).replace("Infinity", ".inf")


def remark(path: Path) -> str:
    """The comment that a yaml begins with."""
    lines = re.match(r"(#.*\n)*", path.read_text())
    assert lines
    return " ".join(line.removeprefix("#").strip() for line in lines[0].splitlines())


def papers(text: str) -> str:
    """The arXiv papers that a text names, as links."""
    found = dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", text))
    return ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in found)


def codes(names: Iterable[str]) -> str:
    """Names as code."""
    return " ".join(f"`{name}`" for name in names)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")
