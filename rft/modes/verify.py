"""`mode=verify`: measures gradients and invariances of the functions of an algorithm, and certifies the reward."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from rft.algorithm import Gradient
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.certificate import Certificate, Kind, Measured, certificate
from rft.algorithm.certificate.dialogues import LAYOUTS, measure_dialogues, same_gradient, separate_rows
from rft.logger.console import titled_table, verdict
from rft.modes.verify_graders import certify_graders
from rft.registry import Plugin
from rft.setup.components import Components


def verify(config: dict[str, Any], console: Console) -> float:
    """Prints the certificates of the algorithm's functions and of the terms of the reward.

    Args:
        config: the resolved config as plain containers.

    Returns:
        1.0.

    Raises:
        ValueError: lists all mistakes of the config; or a function or a reward does not compute what it declares.
    """
    job = Components(config)
    declared = certify(job.algorithm, console)
    layouts = "trajectory" not in job.facts.writes or certify_dialogues(job.algorithm, console)
    scored = certify_graders(job, console)
    if not declared:
        raise ValueError("mode=verify: a part of the algorithm is not what it declares; see the lines marked ✗")
    if not layouts:
        raise ValueError("mode=verify: the gradient depends on the rows that a trajectory is written in; see the table")
    if not scored:
        raise ValueError("mode=verify: a term of the reward does not score as it declares; see the lines marked ✗")
    return 1.0


def certify(algorithm: Algorithm, console: Console) -> bool:
    """Examines every function of an algorithm by itself, on policy, and prints a table and a verdict on each.

    Returns:
        Whether every function declares a gradient and has it.

    Raises:
        ValueError: a function declares an unknown target, or reads a column that it does not declare.
    """
    title = f"certificate of {algorithm.options.name}: each part by itself, on policy"
    table = titled_table(title, ["part", "declared", "measured"], ["factor", "cosine"])
    table.add_column("checks", overflow="fold")
    verdicts, names = [], dict[str, None]()
    for part, plugin, kind in _parts(algorithm):
        found = certificate(plugin, kind)
        table.add_row(f"{part}\n{plugin.name}", _declared(found.declared), *_measured(found.measured), _checks(found))
        names |= dict.fromkeys(found.checks)
        verdicts.append((found.holds, f"{part} {plugin.name}: {_verdict(found)}"))
    console.print(table)
    console.print(f"checked: {', '.join(names)}. Cosines are measured on one tiny policy; they differ on others.")
    for holds, text in verdicts:
        console.print(verdict(holds, text))
    if algorithm.options.advantage_clip is not None:
        console.print("not examined: algorithm.advantage_clip, which changes the gradient of what it limits")
    return all(holds for holds, _ in verdicts)


def certify_dialogues(algorithm: Algorithm, console: Console) -> bool:
    """Prints how the gradient of the algorithm on dialogues relates to that of the expected score, for every layout.

    Returns:
        Whether it is the same for all layouts.
    """
    title = f"{algorithm.options.name} on dialogues of two turns: the gradient of its loss, for rows of a trajectory"
    table = titled_table(title, ["rows", "measured"], ["factor", "cosine"])
    results = {name: measure_dialogues(algorithm, layout) for name, layout in LAYOUTS.items()}
    for name, (measured, _) in results.items():
        table.add_row(name, *_measured(measured))
    separate, _ = measure_dialogues(algorithm, LAYOUTS["a row per turn"], separate_rows)
    table.add_row("a row per turn, if each row counted by itself", *_measured(separate))
    console.print(table)
    first, *others = (gradient for _, gradient in results.values())
    same = all(same_gradient(gradient, first) for gradient in others)
    console.print(verdict(same, f"the gradient {'is the same' if same else 'differs'} for all rows"))
    return same


def _parts(algorithm: Algorithm) -> Iterator[tuple[str, Plugin, Kind]]:
    if algorithm.advantage is not None:
        yield "advantage", algorithm.advantage, "advantage"
    loss, *terms = algorithm.policy.terms
    yield "loss", loss.plugin, "loss"
    if algorithm.policy.mask is not None:
        yield "gradient_mask", algorithm.policy.mask, "gradient mask"
    for term in terms:
        yield f"terms.{term.name}", term.plugin, "loss"
    for role, objective in algorithm.learners.items():
        yield f"{role}_loss", objective.terms[0].plugin, "loss"
    if algorithm.aggregation is not None:
        yield "aggregation", algorithm.aggregation, "aggregation"


def _declared(gradient: Gradient | None) -> Text:
    if gradient is None:
        return Text("nothing", style="bold red")
    cosine = "" if gradient.cosine is None else f" {gradient.cosine:.3f}"
    return Text(f"{gradient.relation}{cosine}\n{gradient.target}")


def _measured(found: Measured | None) -> tuple[str, str, str]:
    """Relation and target, factor, cosine."""
    if found is None:
        return "", "", ""
    return f"{found.relation}\n{found.target}", f"{found.factor:.4g}", f"{found.cosine:.4f}"


def _checks(found: Certificate) -> Text:
    failed = [name for name, holds in found.checks.items() if not holds]
    if failed:
        return Text(f"FAILED: {', '.join(failed)}", style="bold red")
    return Text(f"all {len(found.checks)} hold", style="green")


def _verdict(found: Certificate) -> str:
    failed = [name for name, holds in found.checks.items() if not holds]
    if found.measured is None:
        return (
            "the loss and its statistics must have one value per unit, token (B, T) or row (B,), statistics detached: "
            "return them unreduced"
        )
    if failed:
        return f"fails the check of {', '.join(failed)}"
    wanted = _spelled(found)
    if found.declared is not None and found.as_declared:
        cosine = "" if found.same_cosine else f", with these options {wanted}"
        return f"as declared{cosine}{'; ' if found.declared.note else ''}{found.declared.note}"
    if found.declared is None:
        return f"declares no gradient; if the measured one is intended, register it with gradient={wanted}"
    return f"is not what it declares; measured: gradient={wanted}"


def _spelled(found: Certificate) -> str:
    """The declaration that matches the measurement."""
    assert found.measured is not None
    arguments = [f'"{found.measured.relation}"']
    if found.measured.target != "reward" and found.measured.relation != "none":
        arguments.append(f'target="{found.measured.target}"')
    if found.measured.relation == "near":
        arguments.append(f"cosine={found.measured.cosine:.3f}")
    return f"Gradient({', '.join(arguments)})"
