"""What tests of several folders share."""

import atexit
import functools
import gc
import logging
import os
import pickle
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import rft
from tests.setup.hydra_cache import read_once

if "RFT_CACHE" not in os.environ:  # no test finds what another session has counted, and none writes to a home
    os.environ["RFT_CACHE"] = tempfile.mkdtemp(prefix="rft-cache-")
    atexit.register(shutil.rmtree, os.environ["RFT_CACHE"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, which is imported later; several tests run at a time

CONFIG = Path(rft.__file__).parent / "config"
TEACHER = (
    "model_type: qwen3, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 2"
)
# A run of a second: a model that knows nothing, and a reward that it earns now and then by chance.
TINY = (
    "data.train.count=64",
    "data.eval.heldout.count=8",
    "actor.model_config.hidden_size=32",
    "actor.model_config.intermediate_size=64",
    "actor.model_config.head_dim=8",
    "reward/terms=[exact_match,format]",
    "reward.accuracy=format",
    "reward.terms.format.pattern='[0-9].*'",
    "rollout.max_new_tokens=6",
    "batch.prompts=4",
    "batch.minibatches=1",
    "steps=3",
)
TINY_TEACHER = (f"teacher.model_config={{{TEACHER}}}",)  # knows nothing either
WITH_TEACHER = ("distill", "gkd", "on_policy_distill")
TINY_GROUPS = ("algorithm.group_size=4", "reward.terms.format.weight=1.0")
# What is to be learnt is given.
WITHOUT_WARMUP = (
    "distill", "generative_reward_model", "gkd", "pretrain", "process_reward_model", "reward_model", "sft"
)  # fmt: skip
TINY_WARMUP = ("warmup.steps=2", "warmup.rows=8")
SOON_S = 60.0  # what waits for nothing ends within it on the busiest machine; what waits in vain takes longer
ENDS_S = 30 * SOON_S  # a command that works ends within it on the busiest machine
RUN = "/where/the/run/is"  # where a tiny run is put while its config is composed, so that the same is composed once


def pytest_sessionstart():
    """Collecting the tests imports a million objects, which stay: they are excluded from garbage collection."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000)  # with the default of 700, collections take a twentieth of the time
    gc.enable()


def plain(config: DictConfig) -> dict:
    """A composed config, resolved to plain containers."""
    from rft.strategy.base import AUTO, chosen_dtype  # imports torch

    if config.get("strategy", {}).get("dtype") == AUTO:  # as `settle`, which reads the folder of the run, too
        config.strategy.dtype = chosen_dtype(AUTO, config.strategy.device)
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def composed(overrides: tuple[str, ...], folder: Path, name: str) -> DictConfig:
    """A config as the command line composes it."""
    # as with -cd: the folder is where the config is looked for first, then the package's own
    extra = [] if folder == CONFIG else [f"hydra.searchpath=[file://{CONFIG}]"]
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(name, [*overrides, *extra])


@functools.cache
def composed_of_groups(overrides: tuple[str, ...], name: str) -> bytes:
    """A config of the package's own folder, pickled; the overrides choose options of groups.

    As objects, hundreds of configs would make every garbage collection of the session slower.
    """
    return pickle.dumps(composed(overrides, CONFIG, name))


@functools.cache
def composed_before(overrides: tuple[str, ...], name: str, read: frozenset[tuple[str, str]]) -> bytes:
    """The same with any overrides, resolved and pickled; `read` is what it may read of the environment.

    Hydra applies overrides of values last. Here too, to a copy of the config of the groups, which many tests share.
    """
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        repository = GlobalHydra.instance().config_loader().repository
        values, groups = [], []
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            group = override.is_hydra_override() or repository.group_exists(override.key_or_group)
            (groups if group else values).append(override)
    config = pickle.loads(composed_of_groups(tuple(override.input_line for override in groups), name))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return pickle.dumps(plain(config))


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended exists until its parent has read its status, and does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # of a process that ends, the file can be opened and not be read
        return False


@pytest.fixture(scope="session", autouse=True)
def configs_read_once():
    with pytest.MonkeyPatch.context() as patch:
        read_once(patch, CONFIG)
        yield


@pytest.fixture(scope="session")
def resolved():
    """Composes a config as the command line does, and resolves it to plain containers."""

    def resolve(*overrides: str, folder: Path = CONFIG, name: str = "main") -> dict:
        if folder != CONFIG:
            return plain(composed(overrides, folder, name))
        read = frozenset((key, value) for key, value in os.environ.items() if key.startswith("RFT_"))
        return pickle.loads(composed_before(overrides, name, read))

    return resolve


@pytest.fixture(autouse=True)
def log_handlers():
    """After the test, the handlers that Hydra adds are gone: they write to a stream that pytest closes."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before


@pytest.fixture(autouse=True)
def command_line_forgotten(monkeypatch):
    """After the test, Hydra's record of a command line that ran in this process, and the variable it set, are gone."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    yield
    HydraConfig.instance().cfg = None


@pytest.fixture
def plugins_forgotten(monkeypatch, tmp_path):
    """After the test, what its plugins registered and their modules are gone, and `sys.path` is as before."""
    from rft import algorithm
    from rft.algorithm.roles import ROLES
    from rft.data.rows.schemas import SCHEMAS
    from rft.data.tool_calls import TOOL_CALLS
    from rft.registry import Registry
    from rft.reward import REWARDS
    from rft.train.schedules import SCHEDULES

    tables = [table for table in vars(algorithm).values() if isinstance(table, Registry)]
    for table in (*tables, SCHEMAS, REWARDS, SCHEDULES, TOOL_CALLS):
        monkeypatch.setattr(table, "_entries", dict(table._entries))
    monkeypatch.setattr(ROLES, "_roles", dict(ROLES._roles))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    root = Path(rft.__file__).parent.parent
    folders = (tmp_path, root / "recipes", root / "tests" / "e2e" / "plugins")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and any(Path(file).is_relative_to(folder) for folder in folders):
            del sys.modules[name]


@pytest.fixture(scope="module")
def one_thread():
    """Sums of torch come in one order, so that results can be equal to the last bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def disk_calls(monkeypatch):
    """What is asked of the disk, in order: ("mkdir", path), ("sync", path) and ("rename", the new name)."""
    calls, mkdir, fsync, replace = [], os.mkdir, os.fsync, os.replace

    def makes(path, *given, **options):
        mkdir(path, *given, **options)
        calls.append(("mkdir", str(path)))

    def syncs(handle):
        fsync(handle)
        calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))

    def renames(path, name):
        replace(path, name)
        calls.append(("rename", str(name)))

    for name, recorded in {"mkdir": makes, "fsync": syncs, "replace": renames, "rename": renames}.items():
        monkeypatch.setattr(os, name, recorded)
    return calls


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Calls the `main` of a script with arguments; returns the exit code and what it prints to stderr."""

    def run(main, *arguments):
        capsys.readouterr()  # the progress bars of transformers
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="session")
def sized():
    """Puts the sizes of a run of a second in front of overrides."""

    def sizes(*overrides: str) -> list[str]:
        judged = "algorithm=generative_reward_model" in overrides  # its rows lie in questions
        small = [text.replace(".count=", ".rows.count=") for text in TINY] if judged else list(TINY)
        named = {f"algorithm={name}" for name in WITH_TEACHER} | {"algorithm/advantage=teacher"}
        if named & set(overrides) and "teacher=teacher_server" not in overrides:
            small += TINY_TEACHER
        if {f"algorithm={name}" for name in WITHOUT_WARMUP} & set(overrides):
            return [*small, *overrides]
        return [*small, *TINY_GROUPS, *(() if "warmup=none" in overrides else TINY_WARMUP), *overrides]

    return sizes


def placed(node, folder: str):
    """The config of a run in another folder than `RUN`."""
    if isinstance(node, dict):
        return {key: placed(value, folder) for key, value in node.items()}
    if isinstance(node, list):
        return [placed(value, folder) for value in node]
    return node.replace(RUN, folder) if isinstance(node, str) else node


@pytest.fixture
def tiny(resolved, sized, tmp_path):
    """The resolved config of a tiny run in `tmp_path`, with the overrides on top."""

    def resolve(*overrides: str) -> dict:
        return placed(resolved(*sized(f"output_dir={RUN}", *overrides)), str(tmp_path / "run"))

    return resolve


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory):
    """Runs a script on two ranks of this machine, or more, on the CPU; fails with what they printed."""
    from tests.ranks.forked import run_on_ranks

    def run(script: Path, *arguments: object, ranks: int = 2) -> None:
        log = tmp_path_factory.mktemp("ranks") / "log"
        assert run_on_ranks(Path(script).resolve(), list(map(str, arguments)), ranks, log), log.read_text()

    return run


class ThreadWorld:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank, size, meet, board):
        self.rank, self.size = rank, size
        self._meet, self._board = meet, board

    def gather(self, thing):
        self._board[self.rank] = thing
        self._meet.wait()  # everyone has written
        things = list(self._board)
        self._meet.wait()  # everyone has read
        return things

    def all_sum(self, tensor):
        return sum(self.gather(tensor))

    def exchange(self, parcels):
        return [theirs[self.rank] for theirs in self.gather(parcels)]


@pytest.fixture
def ranks():
    """Runs `work(world)` on some ranks at once, as threads; returns what each returned."""

    def run(size: int, work) -> list:
        meet, board = Barrier(size, timeout=60), [None] * size

        def alone(rank):
            try:
                return work(ThreadWorld(rank, size, meet, board))
            except BaseException:
                meet.abort()  # nobody waits for a rank that failed
                raise

        with ThreadPoolExecutor(size) as threads:
            return [future.result() for future in [threads.submit(alone, rank) for rank in range(size)]]

    return run
