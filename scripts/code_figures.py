"""Prints figures of the code of a checkout: what a step enters, how long things are, what imports what.

python scripts/code_figures.py --checkout .
python scripts/code_figures.py --checkout . --draw    # writes docs/pictures/architecture.svg, and prints nothing

The lines of code are those with a token that is neither a comment nor a docstring. The step of GRPO is the second one
of a tiny default run without a warm-up: from the call of the source's `next` until its next call. It counts the
functions under `rft/` that are entered, and the files that they stand in.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from figures.architecture import draw, measure

STEP = Path(__file__).resolve().parent / "comparison" / "step.py"
LONG = 400  # lines: more are too many for a file
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
OVERRIDES = (
    *("cache=null", "strategy.device=cpu", "warmup=none", "steps=3", "batch.prompts=4", "algorithm.group_size=4"),
    *("data.train.count=32", "data.eval.heldout.count=4", "eval.every=0", "trajectories.every=100"),
)


@dataclass(frozen=True)
class Signature:
    """A function and its parameters, `self` and `cls` left out."""

    name: str
    place: str
    parameters: tuple[str, ...]


def main() -> None:
    """Prints the figures of the checkout that the command line names."""
    parser = argparse.ArgumentParser(description="Prints figures of the code of a checkout.")
    parser.add_argument("--checkout", type=Path, required=True, help="the root of the clone")
    parser.add_argument("--names", action="store_true", help="names every function that the step enters, too")
    parser.add_argument("--draw", action="store_true", help="draws core and parts in place of the figures")
    arguments = parser.parse_args()
    root: Path = arguments.checkout.resolve()
    files = sorted((root / "rft").rglob("*.py"))
    if not files:
        sys.stderr.write(f"error: --checkout {root} has no python files under rft/\n")
        raise SystemExit(1)
    if arguments.draw:
        lines = {path: code_lines(path.read_text()) for path in files}
        (root / "docs" / "pictures" / "architecture.svg").write_text(draw(measure(root, lines)))
        return
    entered = step_of(root)
    sys.stdout.write("\n".join(figures(root, files, entered)) + "\n")
    if arguments.names:
        sys.stdout.write("".join(f"  {name}\n" for name in entered))


def figures(root: Path, files: list[Path], entered: list[str]) -> list[str]:
    """Returns the figures, one a line.

    Args:
        root: of the checkout.
        files: its python files.
        entered: the functions that a step enters, as `file:line name`.
    """
    texts = {str(path.relative_to(root)): path.read_text() for path in files}
    entered_files = {name.split(":")[0] for name in entered}
    named = [name for name in entered if not name.endswith(">")]
    signatures = [each for name, text in texts.items() for each in signatures_of(text, name)]
    longest = sorted(signatures, key=lambda each: -len(each.parameters))[:5]
    checks = sum(len(re.findall(r"^\s*with [\w.]*check\(\)", text, re.MULTILINE)) for text in texts.values())
    cycles = import_cycles(texts)
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    long = {name: number for name, number in lines.items() if number > LONG}
    said = [
        f"one GRPO step enters: {len(entered_files)} files, {len(named)} functions "
        f"({len(entered)} with comprehensions and lambdas)",
        f"lines of code without docstrings, comments and blank lines: {sum(map(code_lines, texts.values()))}",
        f"lines of all: {sum(lines.values())}",
        f"python files: {len(files)}",
        f"files over {LONG} lines: {len(long)}",
        *(f"  {name}: {number}" for name, number in long.items()),
        "longest parameter lists (self and cls are left out):",
        *(f"  {len(each.parameters)}: {each.name} at {each.place}" for each in longest),
        f"lines that open with check(): {checks}",
        f"import cycles (sets of modules that import each other): {len(cycles)}, "
        f"with {sum(map(len, cycles))} modules in all",
    ]
    return [*said, *(f"  {' '.join(cycle)}" for cycle in cycles)]


def step_of(root: Path) -> list[str]:
    """Returns the functions under `rft/` that one step enters, as `file:line name`, in the order of the alphabet.

    Raises:
        RuntimeError: the run failed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RFT_")}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="rft-figures-") as folder:
        out = Path(folder) / "entered.json"
        command = [sys.executable, str(STEP), str(root), str(out), f"output_dir={folder}/run", *OVERRIDES]
        ended = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=False
        )
        if ended.returncode != 0 or not out.exists():
            raise RuntimeError(f"the tiny run failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        entered: list[str] = json.loads(out.read_text())
    return entered


def code_lines(text: str) -> int:
    """Returns the number of lines with a token of code. A docstring is none; another text of several lines is."""
    silent = docstring_lines(ast.parse(text))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - silent)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def signatures_of(text: str, place: str) -> Iterator[Signature]:
    """Yields every function of a file with its parameters."""

    def within(node: ast.AST, prefix: str) -> Iterator[Signature]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                given = child.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                names += [each.arg for each in (given.vararg, given.kwarg) if each is not None]
                own = tuple(name for name in names if name not in ("self", "cls"))
                yield Signature(f"{prefix}{child.name}", f"{place}:{child.lineno}", own)
                yield from within(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from within(child, f"{prefix}{child.name}.")
            else:
                yield from within(child, prefix)

    yield from within(ast.parse(text), "")


def import_cycles(texts: dict[str, str]) -> list[list[str]]:
    """Returns the sets of modules that import each other, directly or by way of others, largest first.

    Every import statement counts, wherever it stands: at the top, in a function, and under `TYPE_CHECKING`. What is
    imported with a module without being named, its parent packages, does not count.

    Args:
        texts: the files by their path from the root.
    """
    paths = {module_of(path): path for path in texts}
    graph = {
        module: imported(texts[path], module, path.endswith("__init__.py"), paths.keys())
        for module, path in paths.items()
    }
    return sorted((sorted(group) for group in components(graph) if len(group) > 1), key=lambda group: -len(group))


def module_of(path: str) -> str:
    """Returns the name of the module that a file is."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(text: str, module: str, is_package: bool, known: Iterable[str]) -> set[str]:
    """Returns the modules of the package that a file names in its import statements."""
    modules, found = set(known), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                below = f"{source}.{alias.name}"
                found.add(below if below in modules else source)
    return (found & modules) - {module}


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of a graph: the modules that each can reach, and be reached by."""
    reached = {start: reachable(graph, start) for start in graph}
    left, groups = set(graph), []
    for start in graph:
        if start in left:
            group = [start, *(other for other in reached[start] if other != start and start in reached[other])]
            left -= set(group)
            groups.append(group)
    return groups


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns what can be reached from a module, itself where it lies on a cycle."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph[module]
    return seen


if __name__ == "__main__":
    main()
