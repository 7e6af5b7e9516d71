"""What a docstring says about each option of its class or function."""

import inspect
import re
from collections.abc import Callable

SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ \n].*\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
REFERENCE = re.compile(r"(see|as (in|of)) (the attributes?\b|`[\w.]+`)", re.IGNORECASE)


def summary(owner: Callable) -> str:
    """The first paragraph of a docstring on one line; empty without one."""
    docs = [_doc(kind) for kind in _kinds(owner)]
    return " ".join(next(filter(None, docs), "").split("\n\n")[0].split())


def sentences(owner: Callable) -> dict[str, str]:
    """What the docstring of a class or function says about each option, on one line.

    An entry that only refers to another one, such as that of a base class, counts where no other has words.
    """
    texts: dict[str, str] = {}
    for body in [body for kind in _kinds(owner) for body in SECTION.findall(f"{_doc(kind)}\n")]:
        for names, text in ENTRY.findall(body):
            for name in names.split(", "):
                if name not in texts or refers(texts[name]):
                    texts[name] = " ".join(text.split())
    return texts


def refers(text: str) -> bool:
    """Whether an entry only refers to another one."""
    return REFERENCE.match(text) is not None


def _kinds(owner: Callable) -> tuple[Callable, ...]:
    return owner.__mro__[:-1] if isinstance(owner, type) else (owner,)


def _doc(kind: Callable) -> str:
    """A docstring; empty for that which a dataclass without one gets, its signature."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return "" if text.startswith(f"{kind.__name__}(") else text
