"""Calls functions of a program inside the sandbox and writes their values; it holds no expected value.

Its source is sent to the sandbox as a program. The program under test runs in the same process and can forge a line.
That gains it nothing: the expected values stay outside, so a forged value is right only if the program knows it.
"""

import json
import os
import sys
import types
from typing import Any

NAME = "program"


def plain(value: Any) -> Any:
    """A value as JSON has it: tuples are lists, keys of mappings are texts, a set is {"set": its sorted values}.

    Raises:
        TypeError: a value of another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(item) for item in value), key=json.dumps)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__} is no value of JSON")


def evaluate(call: dict[str, Any], names: dict[str, Any]) -> Any:
    """The value of a call: {expression} in the names of the program, or {function, args}; see `Call`."""
    if "expression" in call:
        return eval(call["expression"], names)
    name = call["function"]
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)(*call["args"])
    return names[name](*call["args"])


def main() -> None:
    """Reads {program, setup, calls}, writes a line [number, value] for each call that returns, and exits."""
    request = json.loads(sys.stdin.read())
    results = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)  # neither input() nor print() of the program reaches the pipes
    os.dup2(nothing, 1)
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    names = module.__dict__
    exec(compile(request["program"], f"{NAME}.py", "exec"), names)
    exec(compile(request["setup"], "setup", "exec"), names)
    for number, call in enumerate(request["calls"]):
        try:
            line = json.dumps([number, plain(evaluate(call, names))])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a call that fails has no value
            sys.stderr.write(f"call {number}: {type(error).__name__}: {error}\n")
            continue
        os.write(results, f"{line}\n".encode())
    sys.stderr.flush()
    os._exit(0)  # the results are written; to end Python in order takes longer than to fork it
