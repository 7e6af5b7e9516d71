"""Landlock: a process reads below the folders of its view and writes below its working folder alone."""

import ctypes
import os
import struct
from collections.abc import Iterable

from . import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # file rights of each ABI
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # the rights that a rule on a file may have
BIND_AND_CONNECT_TCP, SCOPE_SOCKETS_AND_SIGNALS = 3, 3
VERSION, PATH_BENEATH = 1, 1


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
    network = BIND_AND_CONNECT_TCP if version >= 4 else 0
    scope = SCOPE_SOCKETS_AND_SIGNALS if version >= 6 else 0
    rules = (ctypes.c_uint64 * 3)(handled, network, scope)  # struct landlock_ruleset_attr
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
    allowed = rights if os.path.isdir(path) else rights & OF_A_FILE
    rule = struct.pack("=Qi", allowed, beneath)  # struct landlock_path_beneath_attr, which is packed
    kernel.syscall("landlock_add_rule", kernel.LANDLOCK_ADD, ruleset, PATH_BENEATH, ctypes.c_char_p(rule), 0)
    os.close(beneath)
