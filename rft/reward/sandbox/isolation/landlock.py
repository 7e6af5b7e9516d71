"""Landlock: a process reads below the folders of its view and writes below its working folder alone."""

import ctypes
import os
from collections.abc import Iterable

from . import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # file rights of each ABI
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # the rights that a rule on a file may have
BIND_AND_CONNECT_TCP, SCOPE_SOCKETS_AND_SIGNALS = 3, 3
VERSION, PATH_BENEATH = 1, 1


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64)]


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def restrict(readable: Iterable[str], listed: Iterable[str], writable: Iterable[str]) -> None:
    """Restricts this process and its later children; needs `no_new_privileges`.

    Args:
        readable: files and folders that may be read.
        listed: folders of which only the names of their files may be read.
        writable: files and folders that may be written.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = kernel.syscall("landlock_create_ruleset", kernel.LANDLOCK_CREATE, ctypes.c_void_p(None), 0, VERSION)
    handled = ALL_BY_ABI[max(known for known in ALL_BY_ABI if known <= version)]
    rules = _Ruleset(
        handled,
        BIND_AND_CONNECT_TCP if version >= 4 else 0,
        SCOPE_SOCKETS_AND_SIGNALS if version >= 6 else 0,
    )
    size = ctypes.c_long(8 if version < 4 else 16 if version < 6 else 24)
    ruleset = kernel.syscall("landlock_create_ruleset", kernel.LANDLOCK_CREATE, ctypes.byref(rules), size, 0)
    for path in readable:
        _allow(ruleset, path, READ_FILE | READ_DIR)
    for path in listed:
        _allow(ruleset, path, READ_DIR)
    for path in writable:
        _allow(ruleset, path, handled & ~EXECUTE)
    kernel.syscall("landlock_restrict_self", kernel.LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _Rule(rights if os.path.isdir(path) else rights & OF_A_FILE, beneath)
    kernel.syscall("landlock_add_rule", kernel.LANDLOCK_ADD, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(beneath)
