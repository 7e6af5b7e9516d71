"""Imports by name: folders of plugins, parts of this package, and modules and files of the user's."""

import importlib
import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rft.errors import describe, did_you_mean


def import_all(package: str) -> None:
    """Imports every module of a folder of plugins, which registers them: a file can be added there, or taken out.

    Args:
        package: its name; it may be in the middle of its own import.
    """
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def import_part(module: str, name: str, where: str) -> Any:
    """A function or a class of a part of this package, which a run names.

    Args:
        module: of the part.
        name: of the function or the class.
        where: begins the message: the key and its value.

    Raises:
        ValueError: the part has been taken out.
    """
    try:
        return vars(importlib.import_module(module))[name]
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # what the part itself imports is missing
        raise ValueError(f"{where}: {module} is not in this package; install all of it, or choose another") from error


def require_package(name: str, message: str) -> None:
    """Refuses a run that needs a package which is not installed; the package is not imported.

    Raises:
        ValueError: with this message, which says how to install it.
    """
    if importlib.util.find_spec(name) is None:
        raise ValueError(message)


def import_named(place: str, name: str, where: str, noun: str) -> Callable[..., Any]:
    """A function or a class of a module or a file of the user's.

    Args:
        place: `package.module`, or the path of a file that ends with .py.
        where: begins messages: the key and its value.
        noun: what messages call it.

    Raises:
        ValueError: the place cannot be imported, or has nothing of this name that can be called.
    """
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the file may raise anything
        raise ValueError(f"{where}: {place} cannot be imported ({type(error).__name__}: {error})") from error
    return _callable_of(module, place, name, where, noun)


def is_dotted(name: str) -> bool:
    """Whether a text is the name of a module, or of what a module has."""
    return all(map(str.isidentifier, name.split(".")))


def import_function(path: str, where: str, noun: str) -> Callable[..., Any]:
    """A function of a module of the user's, `module.function`; the rest as of `import_named`."""
    place, _, name = path.rpartition(".")
    import_plugin(place, where)
    return _callable_of(sys.modules[place], place, name, where, noun)


def _callable_of(module: ModuleType, place: str, name: str, where: str, noun: str) -> Callable[..., Any]:
    found = vars(module).get(name)
    if not callable(found):
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise ValueError(f"{where}: {place} has no {noun} {name!r}{did_you_mean(name, known)}")
    return found


def _load_file(file: Path) -> Any:
    """The module of a file, which is run once in a process."""
    file = file.expanduser().resolve()
    name = f"rft_function_{file.stem}_{zlib.crc32(str(file).encode()):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: a dataclass looks its module up
        complete = False
        try:
            spec.loader.exec_module(module)
            complete = True
        finally:
            if not complete:
                del sys.modules[name]
    return sys.modules[name]


def import_plugin(name: str, where: str) -> None:
    """Imports a module of the user, which registers its functions.

    Args:
        where: begins messages: the key, and its value where it is not the name.

    Raises:
        ValueError: the module is not on the path, or an error is raised in it.
    """
    try:
        importlib.import_module(name)
    except Exception as error:  # the module may raise anything
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if missing or not is_dotted(name):
            raise ValueError(
                f"{where}: no module {name!r} is found; it is looked for beside the recipe (-cd <folder>) and on "
                "PYTHONPATH"
            ) from error
        spec = importlib.util.find_spec(name.partition(".")[0])  # that of a module below would import this one again
        file = "" if spec is None else spec.origin or ""
        raise ValueError(f"{where}: the module {name!r} cannot be imported: {describe(error, file)}") from error
