"""Programs that try to break out of the sandbox, to outlive it, to exhaust the machine or to forge a verdict.

Each prints `broken` when it has reached what it must not reach, and `done` at its end.
"""

import textwrap

TRY = """
import os, sys
def attempt(name, function):
    try:
        print("broken", name, function())
    except (OSError, MemoryError, ImportError) as error:
        print("held", name, type(error).__name__)
"""
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""

# name: (statuses, program)
EXHAUST = {
    "fork bomb": (("timeout",), "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "endless loop": (("timeout",), "while True: pass"),
    "endless loop that ignores SIGXCPU": (
        ("timeout", "killed"),
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ),
    "sleeps forever": (("timeout",), "import time\ntime.sleep(10**6)"),
    "waits for input forever": (("timeout",), "import os\nr, w = os.pipe()\nos.read(r, 1)"),
    "memory at once": (("memory",), "x = bytearray(10**12)"),
    "memory in pieces": (("memory",), "x = []\nwhile True: x.append(bytearray(10**6))"),
    "memory of many processes": (
        ("memory",),
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0: break\nx = bytearray(90 << 20)\ntime.sleep(9)",
    ),
    "memory that is shared": (
        ("memory", "error"),
        "import mmap\nx = []\nwhile True:\n    x.append(mmap.mmap(-1, 1 << 20))\n    x[-1].write(bytes(1 << 20))",
    ),
    "huge output": (("output",), "while True: print('x' * 1000)"),
    "huge errors": (("output",), "import sys\nwhile True: sys.stderr.write('x' * 1000)"),
    "deep recursion": (
        ("error", "killed", "memory"),
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + sorted([n], key=f)[0]\nf(0)",
    ),
    "nested source": (("error", "memory", "timeout", "killed"), "eval('(' * 10**4 + ')' * 10**4)"),
    "a number of a billion digits": (("timeout", "memory", "killed"), "x = 9 ** (9 ** 9)"),
}
HELD = {
    "huge file": """
        def fill():
            with open("f", "wb") as file:
                for _ in range(9):
                    file.write(bytes(1 << 20))
                    file.flush()
        attempt("file", fill)
        def several():
            for n in range(9):
                open(f"f{n}", "wb").write(bytes(1 << 19))
        attempt("files", several)
    """,
    "many files": "attempt('files', lambda: [os.mkdir(f'd{n}') for n in range(100)])",
    "reads files outside": """
        for path in ("/etc/passwd", "/etc/shadow", SECRET, REPOSITORY, "/home/x", "/proc/1/environ", "/sys"):
            attempt(path, lambda: os.stat(path))
        for path in ("/", "../..", "/dev", "/root", "/etc"):
            attempt(path, lambda: os.listdir(path))
    """,
    "climbs out of its folder": """
        attempt("up", lambda: open("../" * 20 + SECRET.lstrip("/")).read())
        attempt("up of the root", lambda: os.chdir("/../../..") or open("." + SECRET).read())
    """,
    "writes outside": """
        for path in ("/x", "/lib/x", "/usr/lib/x", "/dev/x", os.__file__, sys.path[0] + "/json/__init__.py"):
            attempt(path, lambda: open(path, "w").write("x"))
        attempt("remove", lambda: os.remove(os.__file__))
        attempt("mode", lambda: os.chmod(os.__file__, 0o777))
    """,
    "links": """
        os.symlink(SECRET, "link")
        attempt("link", lambda: open("link").read())
        os.symlink("/", "root")
        attempt("folder", lambda: open("root" + SECRET).read())
        attempt("hard link", lambda: os.link(os.__file__, "hard"))
    """,
    "network": """
        import socket
        attempt("connect", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
        attempt("bind", lambda: socket.create_server(("0.0.0.0", 0)))
        attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
        attempt("raw", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        def abstract():
            s = socket.socket(socket.AF_UNIX)
            s.connect(chr(0) + NAME)
        attempt("abstract socket", abstract)
        attempt("name", lambda: socket.gethostbyname("example.org"))
    """,
    "environment": """
        attempt("variables", lambda: dict(os.environ) or os.stat("/none"))
        attempt("variable", lambda: os.environ.get("RFT_TEST_SECRET") or os.stat("/none"))
        attempt("of others", lambda: open("/proc/self/environ").read())
    """,
    "signals": """
        import signal
        for process in (os.getppid(), 1, PARENT, SERVER):
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                pass
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    """,
    "descriptors": """
        for number in range(3, 256):
            attempt(number, lambda: os.write(number, b'{"status": "ok", "nonce": ""}'))
            attempt(number, lambda: os.read(number, 1))
            attempt(number, lambda: os.fstat(number))
    """,
    "processes of others": """
        attempt("proc", lambda: os.listdir("/proc"))
        attempt("see the trainer", lambda: os.kill(PARENT, 0))
        attempt("group of the trainer", lambda: os.getpgid(PARENT))
    """,
    "clock": """
        import time
        attempt("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
        attempt("host", lambda: __import__("socket").sethostname("x"))
    """,
    "system calls": CALL
    + """
import platform
X86 = platform.machine() == "x86_64"
calls = {"ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268),
         "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217),
         "perf_event_open": (298, 241), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
         "kexec_load": (246, 104), "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "memfd_create": (319, 279),
         "shmget": (29, 194), "reboot": (169, 142), "init_module": (175, 105), "swapon": (167, 224),
         "open_by_handle_at": (304, 265), "pidfd_open": (434, 434), "clone3": (435, 435), "syslog": (103, 116)}
for name, numbers in calls.items():
    attempt(name, lambda: call(numbers[0 if X86 else 1], 0, 0, 0, 0, 0))
attempt("clone with namespaces", lambda: call(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0))
""",
    "starts programs": """
        import subprocess
        attempt("shell", lambda: subprocess.run(["/bin/sh", "-c", "id"]))
        attempt("python", lambda: os.execv(sys.executable, ["python"]))
        open("x", "w").write("#!/bin/sh")
        os.chmod("x", 0o755)
        attempt("own", lambda: os.execv("./x", ["x"]))
        attempt("user", lambda: os.setuid(0))
        attempt("device", lambda: os.mknod("device", 0o60666, os.makedev(8, 0)))
        attempt("priority", lambda: os.nice(-5))
    """,
    "raises its limits": """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                print("broken", kind)
            except (ValueError, OSError):
                pass
    """,
}
OUTLIVE = {
    "daemon": """
        import time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                time.sleep(60)
            os._exit(0)
    """,
    "daemon that ignores signals": """
        import signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                while True: time.sleep(60)
    """,
    "children that hold stdout": """
        import time
        if os.fork() == 0:
            time.sleep(60)
        print("done", flush=True)
        os._exit(0)
    """,
    "exhausts the processes": """
        import time
        while True:
            try:
                if os.fork() == 0: time.sleep(60)
            except OSError: break
    """,
    "daemon thread": """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    """,
}


def source(program: str, **names: object) -> str:
    """The text of an attack, with what it knows about the machine."""
    known = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return f"{TRY}{known}{textwrap.dedent(program)}\nprint('done')\n"


def writes(content: str, first: int = 3) -> str:
    """A program that writes to every descriptor; `content` is Python source of bytes."""
    loop = f"for number in range({first}, 256):\n    try: os.write(number, {content})\n    except OSError: pass\n"
    return f"import os\n{loop}"
