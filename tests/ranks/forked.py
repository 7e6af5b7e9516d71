"""Scripts on several ranks, forked from a process that has imported torch, transformers and rft.

torchrun and each of its ranks import them again, which takes most of the time of a short script. Tests of torchrun
itself, and of whole runs on ranks, start it: search tests/ for `torch.distributed.run`.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import rft

ROOT = Path(rft.__file__).parent.parent
IMPORTED = ["rft.setup.assembly", "transformers.models.qwen3.modeling_qwen3", "tests.helpers"]
DEADLY = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}  # exit codes of a process that died in native code
DEADLINE_S = 600  # of a script; a loaded machine needs several times what an idle one does
FORKS = multiprocessing.get_context("forkserver")


def run_on_ranks(script: Path, arguments: list[str], ranks: int, log: Path) -> bool:
    """Runs a script on the CPU, as `torchrun --nproc-per-node RANKS script arguments` does.

    When one rank fails, the others are terminated. What they print is in `log`. Returns whether all ranks ended well.

    A script of which a rank dies in native code runs a second time, with a warning that has the stacks of its threads:
    a thread of gloo without Python has ended ranks with a segmentation fault or a damaged heap, in about one of ten
    runs of all tests (torch 2.13). The cause is not known. Python code that fails is not repeated. The stacks of
    threads without Python may be missing: torch prints them in a signal handler that allocates memory, which can die
    itself ("malloc(): mismatching next->prev_size").
    """
    codes = _run(script, arguments, ranks, log)
    if not DEADLY.isdisjoint(codes):
        warnings.warn(f"{script.name} runs again, as a rank of it died:\n{log.read_text()}", stacklevel=2)
        log.write_text("")
        codes = _run(script, arguments, ranks, log)
    return not any(codes)


def _run(script: Path, arguments: list[str], ranks: int, log: Path) -> list[int | None]:
    """The exit code of every rank, negative for a signal."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shared = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with patch.dict(os.environ, shared):  # of the process that is forked, which starts at the first call
        FORKS.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    processes = []
    for rank in map(str, range(ranks)):
        environment = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
        processes.append(FORKS.Process(target=run_script, args=(script, arguments, environment, log)))
        processes[-1].start()
    deadline, running = time.monotonic() + DEADLINE_S, processes
    try:
        while running and wait([process.sentinel for process in running], max(0, deadline - time.monotonic())):
            if any(process.exitcode for process in running):
                break
            running = [process for process in running if process.exitcode is None]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def run_script(script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Runs a script in this process, as Python does."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of the threads without Python, such as those of gloo
    faulthandler.enable()
    os.environ.clear()
    os.environ |= environment
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves them out
