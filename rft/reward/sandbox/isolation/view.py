"""Namespaces: a private read-only root that shows Python's library alone, and new processes for every program."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from . import kernel

UNPRIVILEGED = 65534  # the user and group id in whose place root runs programs
INSIDE = 1000  # the user id that a program sees
BASE = "/tmp"  # where the new root is mounted
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WORK = "/sandbox"  # the working folder of a program


@dataclass(frozen=True)
class Paths:
    """What a program sees of the machine.

    Attributes:
        shown: files and folders that it may read.
        listed: folders above them, of which it sees these files alone; Python finds a module by its folder's list.
    """

    shown: list[str]
    listed: list[str]


def parents(paths: Sequence[str]) -> list[str]:
    """The folders of files and folders."""
    return sorted({os.path.dirname(os.path.abspath(path)) for path in paths})


def shown(packages: Sequence[str]) -> list[str]:
    """The paths that a program reads: Python's library, shared libraries and the packages."""
    python = [
        os.path.join(sys.base_prefix, "lib"),
        os.path.join(sys.base_prefix, "lib64"),
        os.path.dirname(os.__file__),
    ]
    paths: list[str] = []
    for path in sorted(map(os.path.abspath, (*SYSTEM, *python, *packages))):
        if os.path.exists(path) and not any(path == above or path.startswith(f"{above}/") for above in paths):
            paths.append(path)
    return paths


def enter(paths: Sequence[str], network: bool, proc: int) -> None:
    """Moves this process into a root that shows `paths`; no capability of the machine stays. Needs no other thread.

    Args:
        network: a network namespace without a connection too.
        proc: a descriptor of /proc, which the new root does not show.
    """
    os.umask(0o022)
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | (kernel.CLONE_NEWNET if network else 0)
    privileged = os.geteuid() == 0
    if privileged:
        try:
            kernel.unshare(spaces)
        except PermissionError:  # a root without the capabilities, as in a container
            privileged = False
            drop_root()
    if not privileged:
        own_user(spaces, proc)
    socket.sethostname("sandbox")
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    _build(paths)
    if privileged:
        drop_root()
        own_user(0, proc)


def drop_root() -> None:
    """Root becomes a user without privileges: the kernel does not limit the processes of root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
        os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
        kernel.prctl("DUMPABLE", kernel.PR_SET_DUMPABLE, 1)  # or /proc/self/uid_map belongs to root


def own_user(spaces: int, proc: int) -> None:
    """A new user namespace, in which this process is user `INSIDE`, and other new namespaces.

    Args:
        spaces: flags of the other namespaces.
        proc: a descriptor of /proc.
    """
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | spaces)
    write_proc("setgroups", "deny", proc)
    write_proc("uid_map", f"{INSIDE} {user} 1", proc)
    write_proc("gid_map", f"{INSIDE} {group} 1", proc)


def write_proc(name: str, text: str, proc: int) -> None:
    """Writes a file of this process below /proc, of which `proc` is a descriptor."""
    descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def work_folder(mib: int, files: int, place: str = WORK) -> None:
    """An empty working folder of limited size, in the memory."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", place, "tmpfs", flags, f"size={mib}m,nr_inodes={files},mode=700")


def _build(paths: Sequence[str]) -> None:
    held = [(path, os.open(path, os.O_PATH)) for path in (*paths, *DEVICES) if not os.path.islink(path)]
    links = [(path, os.readlink(path)) for path in paths if os.path.islink(path)]
    kernel.mount("tmpfs", BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path, descriptor in held:
        target = BASE + path
        if path.startswith("/dev/") or not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
        else:
            os.makedirs(target, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", target, "", kernel.MS_BIND | kernel.MS_REC)
        if path not in DEVICES:
            kernel.read_only(target)
        os.close(descriptor)
    for path, goal in links:
        os.makedirs(os.path.dirname(BASE + path), exist_ok=True)
        os.symlink(goal, BASE + path)
    os.mkdir(BASE + WORK)
    if not os.path.exists(f"{BASE}/tmp"):
        os.symlink(WORK, f"{BASE}/tmp")
    kernel.enter_root(BASE)
    again = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY
    kernel.mount("none", "/", "", again | kernel.MS_NOSUID | kernel.MS_NODEV)
