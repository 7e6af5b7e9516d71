"""System calls that Python's `os` lacks, by ctypes. Each raises an OSError with the errno of the kernel."""

import ctypes
import os
import platform

X86 = platform.machine() == "x86_64"
ARM = platform.machine() == "aarch64"

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
CAP_AMBIENT_CLEAR_ALL, LAST_CAPABILITY = 4, 63
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
EINVAL = 22
# Numbers that the architectures share, and those that they do not: (x86_64, aarch64).
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
SECCOMP, PIVOT_ROOT, CAPSET = (317, 155, 126) if X86 else (277, 41, 91)

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """The result of a call; raises the OSError of a negative one."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """A system call by its number; whole numbers are passed as 64 bits."""
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return check(_libc.syscall(ctypes.c_long(number), *passed), what)


def unshare(flags: int) -> None:
    """Moves this process (its children, for a pid namespace) into new namespaces."""
    check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    words = [text.encode() for text in (source, target, kind)]
    check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def read_only(target: str) -> None:
    """Makes a mount and all mounts below it read-only, without set-user-id programs and devices."""
    # struct mount_attr: what is set and cleared, the propagation, and the user namespace
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    path = ctypes.c_char_p(target.encode())
    syscall(f"mount_setattr {target}", MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, ctypes.byref(attributes), size)


def enter_root(folder: str) -> None:
    """Makes a mount the root of this process's mount namespace, and removes the old root from it."""
    os.chdir(folder)
    dot = ctypes.c_char_p(b".")
    syscall("pivot_root", PIVOT_ROOT, dot, dot)
    check(_libc.umount2(b".", MNT_DETACH), "umount2 of the old root")
    os.chdir("/")


def prctl(what: str, option: int, first: int, second: int = 0) -> None:
    """prctl(2)."""
    passed = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    check(_libc.prctl(ctypes.c_int(option), *passed), f"prctl {what}")


def die_with_parent() -> None:
    """The kernel kills this process with SIGKILL when its parent ends."""
    prctl("PDEATHSIG", PR_SET_PDEATHSIG, 9)


def no_new_privileges() -> None:
    """No execve of this process or its children gives privileges."""
    prctl("NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Removes every capability for good."""
    prctl("CAP_AMBIENT", PR_CAP_AMBIENT, CAP_AMBIENT_CLEAR_ALL)
    for capability in range(LAST_CAPABILITY):
        try:
            prctl("CAPBSET_DROP", PR_CAPBSET_DROP, capability)
        except OSError as error:  # the kernel knows no capability of this number, nor of a higher one
            if error.errno != EINVAL:
                raise
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscall("capset", CAPSET, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
