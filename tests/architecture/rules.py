"""The rules of tests/test_architecture.py: layers, parts, cycles, the mirror of the tests, sizes, and words that a
package must not contain.

Each rule is a function of a tree of files that yields its violations ("where: what", without line numbers).
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.parts import NEEDS, files_of_parts

# A module imports only from layers below its own, or from its own package (the folder below rft/).
LAYERS = {
    "main": 8,
    "modes": 7,
    "setup": 6,
    "train": 5,
    "evaluation": 4,
    "rollout": 3,
    "reward": 3,
    "data": 2,
    "actor": 2,
    "strategy": 1,
    "algorithm": 1,
    "report": 1,
    "remote": 0,
    "worker": 0,
    "batch": 0,
    "logger": 0,
}
ROOT_MODULES = (
    "",
    "imports",
    "registry",
    "ranges",
    "conditions",
    "errors",
    "metrics",
    "redaction",
    "distributed",
    "stateful",
    "sanitize",
    "waits",
)  # modules of the root that everything may import
LINES, FILES = 400, 13
BACKENDS = re.compile(r"vllm|sglang|fsdp", re.IGNORECASE)
MODALITIES = re.compile(r"\b(image|audio|video|pixel)s?\b", re.IGNORECASE)
PROCESSOR_KEYS = re.compile(
    r"\b(pixel_values\w*|(image|video)_grid_thw|image_sizes|pixel_attention_mask|aspect_ratio_\w+|cross_attention_mask"
    r"|input_features|feature_attention_mask|input_values|mm_token_type_ids|num_crops|second_per_grid_ts)\b"
)
METAPHORS = re.compile(
    r"\b(is told|are told|says no|say no|goes on|go on|it says|has it that)\b"
    r"|\b(nobody|somebody|whoever|theirs|everyones|mine)\b",
    re.IGNORECASE,
)
ROLE_KEYS = ("critic", "reference", "prm", "teacher")
# Names of losses that are ordinary words too, or outputs of a forward and metrics of the same name.
WORDS = {"value", "teacher", "nll", "none", "group", "entropy", "kl", "drift", "router_balance", "pass_at_k"}


def modules(root: Path) -> dict[str, Path]:
    """Every module and package below rft/, by its dotted name."""
    found = {}
    for path in sorted((root / "rft").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree_of(path: Path) -> ast.Module:
    text = path.read_text()
    try:
        return ast.parse(text)
    except SystemError:  # CPython 3.11 counts the depth of all threads in one place (python/cpython#106905)
        return ast.parse(text)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file, for all rules; `nodes_of.cache_clear` frees them."""
    return list(ast.walk(tree_of(path)))


def dotted(node: ast.expr) -> str:
    """The name of what is called, `a.b.c`; what is no name is empty: `.c` for `f().c`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of rft that a module imports anywhere: at the top, in a function, for type checks, or by name."""
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {one if one in known else base for one in inner}
        elif isinstance(node, ast.Call) and "import_module" in dotted(node.func):
            found |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return {one for one in found if one in known and one != name}


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def layers(root: Path) -> Iterator[str]:
    known = modules(root)
    for name, path in known.items():
        own = package_of(name)
        if own not in LAYERS and own not in ROOT_MODULES:
            yield f"{name}: no layer"
            continue
        for other in imports(name, path, known):
            to = package_of(other)
            below = to in ROOT_MODULES or (own not in ROOT_MODULES and LAYERS.get(to, 99) < LAYERS[own])
            if to != own and not below:
                yield f"{name}: imports {other}"


def parts(root: Path) -> Iterator[str]:
    """Imports of a file of a part from outside the part, and outside those that need it."""
    known, of_parts = modules(root), files_of_parts(root)
    for name, path in known.items():
        own = {part for part, files in of_parts.items() if path in files}
        own |= {needed for part in own for needed in NEEDS.get(part, ())}
        for other in imports(name, path, known):
            if any(known[other] in files and part not in own for part, files in of_parts.items()):
                yield f"{name}: imports {other}"


def cycles(root: Path) -> Iterator[str]:
    """Modules that reach themselves by imports (quadratic, and short)."""
    known = modules(root)
    edges = {name: imports(name, path, known) for name, path in known.items()}
    reached = {}
    for start in edges:
        seen, stack = set(), list(edges[start])
        while stack:
            if (one := stack.pop()) not in seen:
                seen.add(one)
                stack += edges[one]
        reached[start] = seen
    for one in edges:
        if one in reached[one]:
            yield f"{one}: in a cycle with " + " ".join(
                sorted(o for o in reached[one] if one in reached[o] and o != one)
            )


def mirror(root: Path) -> Iterator[str]:
    """`tests/data/test_x.py` or `test_x_what.py` tests `rft/data/x.py`, or the package `rft/data/x/`."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        folder = path.parent.relative_to(root / "tests")
        if folder.parts[:1] in (("e2e",), ("scripts",)):
            continue
        words = path.stem.removeprefix("test_").split("_")
        names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        there = root / "rft" / folder
        if not any((there / f"{name}.py").exists() or (there / name / "__init__.py").exists() for name in names):
            yield f"{path.relative_to(root)}: mirrors no module"


def sizes(root: Path) -> Iterator[str]:
    for top in ("rft", "tests", "scripts", "recipes"):
        for path in sorted((root / top).rglob("*.py")):
            if len(path.read_text().splitlines()) > LINES:
                yield f"{path.relative_to(root)}: more than {LINES} lines"


def folders(root: Path) -> Iterator[str]:
    for top in ("rft", "tests", "scripts"):
        for folder in sorted({path.parent for path in (root / top).rglob("*.py")}):
            if len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) > FILES:
                yield f"{folder.relative_to(root)}: more than {FILES} files"


def calls(root: Path) -> Iterator[str]:
    """`hasattr`, `getattr` with a default, `print`, and an `except` that catches everything."""
    for name, path in modules(root).items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("hasattr", "print"):
                    yield f"{name}: {node.func.id}"
                if node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2:
                    yield f"{name}: getattr with a default"
            if isinstance(node, ast.ExceptHandler):
                caught = "" if node.type is None else ast.unparse(node.type)
                if re.search(r"\b(Base)?Exception\b", caught) or not caught:
                    yield f"{name}: except {caught}".rstrip()


def unpickles(root: Path) -> Iterator[str]:
    """Calls that run the code in a pickle: `pickle.load` and the like, and `torch.load` without `weights_only=True`."""
    for top in ("rft", "scripts", "recipes"):
        for path in sorted((root / top).rglob("*.py")):
            for node in nodes_of(path):
                called = dotted(node.func) if isinstance(node, ast.Call) else ""
                if re.fullmatch(r"(c?pickle|dill|cloudpickle|joblib|marshal|shelve)\.(loads?|Unpickler|open)", called):
                    yield f"{path.relative_to(root)}: {called}"
                elif called.endswith("torch.load") and "weights_only=True" not in map(ast.unparse, node.keywords):
                    yield f"{path.relative_to(root)}: torch.load without weights_only=True"


def remote_code(root: Path) -> Iterator[str]:
    """Configs and tokenizers that are read without `trust_remote_code`: by default transformers asks on the terminal
    whether to run the code of their folder."""
    for top in ("rft", "scripts", "recipes"):
        for path in sorted((root / top).rglob("*.py")):
            for node in nodes_of(path):
                called = dotted(node.func) if isinstance(node, ast.Call) else ""
                safe = isinstance(node, ast.Call) and "trust_remote_code" in {word.arg for word in node.keywords}
                if re.fullmatch(r"Auto(Config|Tokenizer|Processor)\.from_pretrained", called) and not safe:
                    yield f"{path.relative_to(root)}: {called}"


@functools.cache
def code_words(path: Path) -> list[str]:
    """Identifiers and strings of the code: no docstrings, no comments."""
    return list(_code_words(nodes_of(path)))


def _code_words(nodes: list[ast.AST]) -> Iterator[str]:
    prose = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                prose.add(first.value)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def algorithm_names(root: Path) -> set[str]:
    """Algorithms, by their yaml, and every loss and advantage, by its registration."""
    found = {path.stem for path in (root / "rft/config/algorithm").glob("*.yaml") if not path.stem.startswith("_")}
    for path in (root / "rft/algorithm").rglob("*.py"):
        found |= set(re.findall(r"(?:LOSSES|ADVANTAGES)\.register\(\s*\"(\w+)\"", path.read_text()))
    return found - WORDS


def names_of_algorithms(root: Path) -> Iterator[str]:
    """The name of a loss, an advantage or an algorithm, as a string or behind `algorithm=`."""
    names = algorithm_names(root)
    for module, path in modules(root).items():
        if package_of(module) != "algorithm":
            for word in code_words(path):
                for name in {word, *re.findall(r"\balgorithm=(\w+)", word)} & names:
                    yield f"{module}: {name}"


def options_of_algorithms(root: Path) -> Iterator[str]:
    """In train/: a field of `AlgorithmOptions` read from options, and the name of a role."""
    fields = set()
    for path in (root / "rft/algorithm").rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and node.name == "AlgorithmOptions":
                fields |= {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}  # type: ignore
    for module, path in modules(root).items():
        if package_of(module) == "train":
            text = path.read_text()
            for field in re.findall(r"\boptions\.(\w+)|\balgorithm\.(\w+)=", text):
                yield from (f"{module}: option {one}" for one in field if one in fields)
            for word in code_words(path):
                if word in ROLE_KEYS:
                    yield f"{module}: role {word}"


def backends(root: Path) -> Iterator[str]:
    for module, path in modules(root).items():
        for word in code_words(path):
            for name in BACKENDS.findall(word):
                if name.lower() not in module:
                    yield f"{module}: {name.lower()}"


def modalities(root: Path) -> Iterator[str]:
    for module, path in modules(root).items():
        if not module.startswith("rft.data.encode"):
            for word in MODALITIES.findall(path.read_text().replace("_", " ")):
                yield f"{module}: {word.lower()}"


def processor_keys(root: Path) -> Iterator[str]:
    for module, path in modules(root).items():
        for match in PROCESSOR_KEYS.finditer(path.read_text()):
            yield f"{module}: {match[0]}"


def metaphors(root: Path) -> Iterator[str]:
    for module, path in modules(root).items():
        if METAPHORS.search(path.read_text()):
            yield module


RULES = (
    layers,
    parts,
    cycles,
    mirror,
    sizes,
    folders,
    calls,
    unpickles,
    remote_code,
    names_of_algorithms,
    options_of_algorithms,
    backends,
    modalities,
    processor_keys,
    metaphors,
)
