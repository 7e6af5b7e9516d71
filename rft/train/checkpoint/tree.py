"""States as JSON and tensors: tensors go to safetensors, dicts, lists, numbers and texts to one JSON file."""

import base64
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {  # tag: class, to text, from text
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (time, time.isoformat, time.fromisoformat),
    "$decimal": (Decimal, str, Decimal),
}


def split(state: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """A state as something that JSON can hold, and its tensors by name.

    Args:
        state: of dicts, lists, tuples, tensors, numbers, texts, bytes, dates and None.
        name: the beginning of the tensors' names.

    Raises:
        ValueError: the state holds something else; names its place.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, name, tensors), tensors


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.dim() == 0:
            return {"$number": value.item(), "dtype": dtype}
        assert name not in tensors, f"two tensors of a state have the name {name}"
        tensors[name] = value.detach()
        return {"$tensor": name, "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(item, f"{name}/{key}".lstrip("/"), tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$items": [[_encode(key, name, tensors), item] for key, item in pairs]}
    for tag, (kind, to_text, _) in TEXTS.items():
        if type(value) is kind:
            return {tag: to_text(value)}
    raise ValueError(
        f"a checkpoint cannot hold {name}, an object of the class {type(value).__name__}; a state_dict returns dicts, "
        "lists, tensors, numbers, texts and None, and so do the fields of a row"
    )


def join(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `split` made a node of, with these tensors."""
    if isinstance(node, list):
        return [join(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    match tag:
        case None:
            return {key: join(item, tensors) for key, item in node.items()}
        case "$tensor":
            return tensors[node[tag]]
        case "$number":
            return torch.tensor(node[tag], dtype=_dtype(node))
        case "$tuple":
            return tuple(join(item, tensors) for item in node[tag])
        case "$items":
            return {join(key, tensors): join(item, tensors) for key, item in node[tag]}
        case _:
            return TEXTS[tag][2](node[tag])


def places(node: Any, template: Any = None) -> Iterator[tuple[str, Tensor]]:
    """Names of the tensors of a node, and where to load them: the tensors of the template, or new ones on the CPU.

    Args:
        template: a state with tensors at the same places, spread over the ranks as they are; it may lack some.
    """
    if isinstance(node, list):
        parts = template if isinstance(template, list | tuple) and len(template) == len(node) else [None] * len(node)
        for item, part in zip(node, parts, strict=True):
            yield from places(item, part)
    elif isinstance(node, dict):
        if "$tensor" in node:
            shape, dtype = torch.Size(node["shape"]), _dtype(node)
            fits = isinstance(template, Tensor) and (template.shape, template.dtype) == (shape, dtype)
            yield node["$tensor"], template.detach() if fits else torch.empty(shape, dtype=dtype)
        elif "$tuple" in node:
            yield from places(node["$tuple"], template)
        else:
            own = template if isinstance(template, Mapping) else {}
            pairs = node["$items"] if "$items" in node else [[key, item] for key, item in node.items()]
            for key, item in pairs:
                yield from places(item, own.get(join(key, {})))


def kinds(node: Any) -> Any:
    """What `split` made, with the name of its type in the place of every value; JSON keeps these types."""
    if isinstance(node, dict):
        return {key: kinds(item) for key, item in node.items()}
    if isinstance(node, list):
        return [kinds(item) for item in node]
    return next((kind.__name__ for kind in (bool, int, float, str) if isinstance(node, kind)), "null")


def _dtype(node: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, node["dtype"])
    assert isinstance(dtype, torch.dtype)
    return dtype
