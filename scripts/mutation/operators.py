"""The fixed lists of changes that `mutate.py` makes to a function, one at a time."""

import ast
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

SWAPPED_SIGNS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
SWAPPED_PRODUCTS: dict[type, type] = {ast.Mult: ast.Div, ast.Div: ast.Mult}
SWAPPED_LOGIC: dict[type, type] = {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And}
NEGATED: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPPOSITES = {"max": "min", "maximum": "minimum", "amax": "amin", "clamp_max": "clamp_min", "argmax": "argmin"}
OPPOSITES |= {low: high for high, low in OPPOSITES.items()}
SIDES = (("low", "high"), ("lower", "upper"), ("positive", "negative"), ("pos", "neg"))
KEEPS = ("keep", "batch['loss_mask']")
CLAMPS = ("clamp", "clamp_min", "clamp_max", "clip")
FLAGS = ("descending", "largest")
SHAPES = {"dim", "dims", "dtype", "keepdim"}  # keywords whose numbers are no mathematics
SHAPED = {"sum", "mean", "cumsum", "flip", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "amax"}
SHAPED |= {"amin", "any", "all", "unsqueeze", "squeeze", "expand", "reshape", "view", "stack", "cat", "softmax", "size"}
SHAPED |= {
    "log_softmax",
    "logsumexp",
    "argsort",
    "sort",
    "select",
    "transpose",
    "flatten",
    "full",
    "new_full",
    "new_zeros",
}
LOOKS = ("shape", "device", "dtype")  # attributes that a mask does not change


@dataclass(frozen=True)
class Change:
    """One changed function.

    Attributes:
        operator: the name of the function that made it.
        line: of the source file.
        removed, added: the lines that differ, as `ast.unparse` writes them.
        code: what takes the place of the function's `__code__`.
    """

    operator: str
    line: int
    removed: str
    added: str
    code: CodeType


def sign(node: ast.AST) -> Iterator[ast.AST]:
    """Takes a minus away, swaps + and -, and negates what is returned first."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        yield from _other(node, SWAPPED_SIGNS)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple | ast.Dict):
        parts = list(node.value.elts if isinstance(node.value, ast.Tuple) else node.value.values)
        parts[:1] = [ast.UnaryOp(ast.USub(), part) for part in parts[:1]]
        yield ast.Return(
            ast.Tuple(parts, ast.Load()) if isinstance(node.value, ast.Tuple) else ast.Dict(node.value.keys, parts)
        )


def product(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps * and /."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        yield from _other(node, SWAPPED_PRODUCTS)


def detach(node: ast.AST) -> Iterator[ast.AST]:
    """Drops `.detach()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
        yield node.func.value


def extremes(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps max and min, and the bounds of a clamp."""
    if isinstance(node, ast.Attribute) and node.attr in OPPOSITES:
        yield ast.Attribute(node.value, OPPOSITES[node.attr], node.ctx)
    elif isinstance(node, ast.Name) and node.id in OPPOSITES:
        yield ast.Name(OPPOSITES[node.id], node.ctx)
    elif isinstance(node, ast.Constant) and node.value in ("amin", "amax"):
        yield ast.Constant(OPPOSITES[node.value])
    elif isinstance(node, ast.Call) and _called(node) in ("clamp", "clip"):
        if any(keyword.arg in ("min", "max") for keyword in node.keywords):
            named = [(OPPOSITES.get(keyword.arg or "", keyword.arg), keyword.value) for keyword in node.keywords]
            yield ast.Call(node.func, node.args, [ast.keyword(*pair) for pair in named])
        elif len(node.args) > 1:
            yield ast.Call(node.func, [*node.args[:-2], node.args[-1], node.args[-2]], node.keywords)


def sides(node: ast.AST) -> Iterator[ast.AST]:
    """Takes `clip_high` for `clip_low`, and so for every name that ends like this."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        head, joint, tail = node.id.rpartition("_")
        for pair in SIDES:
            if tail in pair:
                yield ast.Name(head + joint + pair[1 - pair.index(tail)], node.ctx)


def comparison(node: ast.AST) -> Iterator[ast.AST]:
    """Negates a comparison."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in NEGATED:
        yield ast.Compare(node.left, [NEGATED[type(node.ops[0])]()], node.comparators)


def logic(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps & and |, `and` and `or`, and takes a ~ or `not` away."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        yield from _other(node, SWAPPED_LOGIC)


def mask(node: ast.AST) -> Iterator[ast.AST]:
    """Forgets a mask: `loss_mask` is True, a `where` with zero is its other arm; swaps arms of other `where`."""
    if isinstance(node, ast.Name | ast.Subscript) and ast.unparse(node) in KEEPS and isinstance(node.ctx, ast.Load):
        yield ast.BinOp(node, ast.BitOr(), ast.Constant(True))
    elif isinstance(node, ast.Call) and _called(node) == "where" and isinstance(node.func, ast.Attribute):
        algorithm = len(node.args) == 2
        arms = [node.func.value, node.args[1]] if algorithm else node.args[1:]
        kept = [arm for arm in arms if not (isinstance(arm, ast.Constant) and arm.value == 0)]
        if len(kept) == 1:
            yield kept[0]
        elif not algorithm:
            yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], [])
    elif isinstance(node, ast.Call) and _called(node) == "masked_fill" and isinstance(node.func, ast.Attribute):
        yield node.func.value


def constant(node: ast.AST) -> Iterator[ast.AST]:
    """Doubles a number, makes 1 of 0, and the other of True and False where it is a direction."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield ast.Constant(2 * node.value or type(node.value)(1))
    elif isinstance(node, ast.keyword) and node.arg in FLAGS and isinstance(node.value, ast.Constant):
        yield ast.keyword(node.arg, ast.Constant(not node.value.value))


def mean_sum(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps mean and sum; a mask has a mean, too."""
    other = {"mean": "sum", "sum": "mean"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in other:
        function = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        value, attribute = (node.args[0] if function else node.func.value), other[node.func.attr]
        number = ast.BinOp(value, ast.Mult(), ast.Constant(1.0))
        yield ast.Call(ast.Attribute(number, attribute, ast.Load()), node.args[function:], node.keywords)


def bound(node: ast.AST) -> Iterator[ast.AST]:
    """Drops a clamp, or an absolute value."""
    if isinstance(node, ast.Call) and _called(node) in (*CLAMPS, "abs") and isinstance(node.func, ast.Attribute):
        function = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        yield node.args[0] if function else node.func.value


def effect(node: ast.AST) -> Iterator[ast.AST]:
    """Drops a call that stands alone, and an assignment to an attribute or to an entry."""
    alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    entry = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if (alone or entry) and not ast.unparse(node).startswith("logging."):
        yield ast.Pass()


def option(node: ast.AST) -> Iterator[ast.AST]:
    """Drops a keyword of a call."""
    if isinstance(node, ast.Call):
        for dropped in node.keywords:
            yield ast.Call(node.func, node.args, [keyword for keyword in node.keywords if keyword is not dropped])


def branch(node: ast.AST) -> Iterator[ast.AST]:
    """Takes the other arm of an `if`, unless `comparison` or `logic` changes its test."""
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)  # type: ignore[arg-type]


Operators = tuple[Callable[[ast.AST], Iterator[ast.AST]], ...]
OPERATORS: Operators = (
    sign,
    product,
    detach,
    extremes,
    sides,
    comparison,
    logic,
    mask,
    constant,
    mean_sum,
    bound,
)
WIRING: Operators = (sign, product, comparison, logic, constant, effect, option, branch)


def definition(source: str, name: str) -> Any:
    """The function of a module, or None.

    Args:
        source: of the module.
        name: as the function's `__qualname__` has it.
    """
    tree: Any = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        body = [] if tree is None else tree.body
        tree = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
    return tree


def preceded(function: FunctionType, statement: str) -> CodeType:
    """The code of a function, after a statement."""
    tree = definition(Path(function.__code__.co_filename).read_text(), function.__qualname__)
    tree.decorator_list = []
    tree.body[:0] = ast.parse(statement).body
    return _code(tree)


def changes(source: str, name: str, operators: Operators = OPERATORS) -> list[Change]:
    """Every change of a function, in the file's order; `source` and `name` as for `definition`."""
    tree = definition(source, name)
    tree.decorator_list = []
    known = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known |= {argument.arg for argument in ast.walk(tree) if isinstance(argument, ast.arg)}
    lines = ast.unparse(tree).splitlines()
    found: dict[tuple[str, ...], Change] = {}
    for node, put in _sites(tree):
        for operator in operators:
            for other in operator(node):
                if operator is sides and isinstance(other, ast.Name) and other.id not in known:
                    continue
                put(other)
                text = ast.unparse(tree).splitlines()
                if text != lines and tuple(text) not in found:
                    removed, added = _difference(lines, text)
                    line = node.value.lineno if isinstance(node, ast.keyword) else vars(node)["lineno"]
                    found[tuple(text)] = Change(operator.__name__, line, removed, added, _code(tree))
        put(node)
    return list(found.values())


def changes_of(function: FunctionType, operators: Operators = OPERATORS) -> list[Change]:
    """Every change of a function."""
    return changes(Path(function.__code__.co_filename).read_text(), function.__qualname__, operators)


def _sites(tree: ast.AST) -> list[tuple[ast.AST, Callable[[ast.AST], None]]]:
    """Every node of the body where a change may be made, with what puts another node in its place."""
    found: list[tuple[ast.AST, Callable[[ast.AST], None]]] = []

    def visit(parent: ast.AST) -> None:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(parent, ast.Call):
                continue
            if isinstance(parent, ast.Subscript) and field == "slice":
                continue
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(child, ast.expr_context) or _of_shape(parent, child):
                    continue
                if isinstance(parent, ast.Attribute) and parent.attr in LOOKS:
                    continue
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue  # a docstring
                found.append((child, _setter(parent, field, value, index)))
                visit(child)

    visit(tree)
    return [(node, put) for node, put in found if isinstance(node, ast.expr | ast.stmt | ast.keyword)]


def _setter(parent: ast.AST, field: str, value: object, index: int) -> Callable[[ast.AST], None]:
    if isinstance(value, list):
        return lambda node: value.__setitem__(index, node)
    return lambda node: setattr(parent, field, node)


def _of_shape(parent: ast.AST, child: ast.AST) -> bool:
    """A number that says which dimension."""
    if isinstance(child, ast.keyword):
        return child.arg in SHAPES
    number = child.operand if isinstance(child, ast.UnaryOp) else child
    whole = isinstance(number, ast.Constant) and isinstance(number.value, int)
    return whole and isinstance(parent, ast.Call) and _called(parent) in SHAPED


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


def _other(node: ast.BinOp | ast.AugAssign | ast.BoolOp, swapped: dict[type, type]) -> Iterator[ast.AST]:
    if type(node.op) in swapped:
        yield type(node)(**{**dict(ast.iter_fields(node)), "op": swapped[type(node.op)]()})


def _difference(before: list[str], after: list[str]) -> tuple[str, str]:
    marked = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
    return tuple("\n".join(line[2:].strip() for line in marked if line[0] == mark) for mark in "-+")  # type: ignore


def _code(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> CodeType:
    module = ast.Module([tree], [])
    code = compile(ast.fix_missing_locations(module), f"<{tree.name}, changed>", "exec")
    return next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == tree.name)
