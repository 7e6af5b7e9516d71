"""A seccomp filter: system calls that a program needs for no computation fail with EPERM."""

import ctypes

from . import kernel

# (x86_64, aarch64); None: the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "execve": (59, 221), "execveat": (322, 281),
    # namespaces and mounts
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # parts of the kernel with a history of holes
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18), "nfsservctl": (None, 42), "personality": (135, 92), "modify_ldt": (154, None),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None), "syslog": (103, 116),
    "vhangup": (153, 58), "sync": (162, 81), "syncfs": (306, 267), "mbind": (237, 235),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "set_mempolicy": (238, 237),
    # memory that no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # the network; socketpair is allowed, which asyncio needs
    "socket": (41, 198),
}  # fmt: skip
CLONE, CLONE3 = (56, 435) if kernel.X86 else (220, 435)
NEW_NAMESPACES = 0x7E020000 | 0x80  # the CLONE_NEW flags
AUDIT_ARCH = 0xC000003E if kernel.X86 else 0xC00000B7
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF operations on 32-bit words
AT_NUMBER, AT_ARCH, AT_FLAGS = 0, 4, 16  # offsets in struct seccomp_data, little-endian
KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x50000 | 1, 0x50000 | 38
SET_MODE_FILTER = 1


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def instructions() -> list[tuple[int, int, int, int]]:
    """The filter (operation, jump if true, jump if false, value)."""
    numbers = [pair[0 if kernel.X86 else 1] for pair in DENIED.values()]
    code = [(LOAD, 0, 0, AT_ARCH), (EQUAL, 1, 0, AUDIT_ARCH), (RETURN, 0, 0, KILL), (LOAD, 0, 0, AT_NUMBER)]
    if kernel.X86:
        code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the x32 numbers
    for number in numbers:
        if number is not None:
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, EPERM)]
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ENOSYS)]  # its flags are in memory; libc then uses clone
    code += [(EQUAL, 0, 3, CLONE), (LOAD, 0, 0, AT_FLAGS), (ANY_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, EPERM)]
    return [*code, (RETURN, 0, 0, ALLOW)]


def restrict() -> None:
    """Installs the filter for this process and its later children; needs `no_new_privileges`.

    Raises:
        OSError: the kernel has no seccomp, or the architecture is neither x86_64 nor aarch64.
    """
    if not (kernel.X86 or kernel.ARM):
        raise OSError(kernel.EINVAL, "the filter is written for x86_64 and aarch64")
    code = instructions()
    array = (_Instruction * len(code))(*(_Instruction(*instruction) for instruction in code))
    program = _Program(len(code), array)
    kernel.syscall("seccomp", kernel.SECCOMP, SET_MODE_FILTER, 0, ctypes.byref(program))
