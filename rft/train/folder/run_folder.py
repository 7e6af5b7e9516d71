"""The folder of a run: an unfinished run is continued where the command allows it, otherwise a free folder is taken."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rft.distributed import World
from rft.errors import did_you_mean
from rft.logger.disk import make_folder, write_text
from rft.logger.history import read_stages
from rft.logger.media import MEDIA
from rft.train.checkpoint.names import checkpoints_in
from rft.train.folder.resume import Difference, changed_keys, describe_changes, overrides, unloadable_keys
from rft.train.folder.run_lock import LOCK, RunLock
from rft.train.stop import STOPPED

CONFIG = "config.yaml"
RESULT = "result.json"  # written when a run has ended well, after its report
CHECKPOINTS = "checkpoints"
REF_LOGPROBS = "ref_logprobs.pt"  # of a precomputed reference
EVALUATION, ANSWERS = "evaluation.json", "answers.jsonl"  # of mode=evaluate
PARTIAL_CONFIG = ".config.yaml.partial"  # left by a process that was killed while it wrote the config
RESCORED, RESCORED_ANSWERS = "rescored.json", "rescored.jsonl"  # of mode=evaluate with evaluate.responses
AUTO, NEVER, FORK = "auto", "never", "fork"  # values of `resume`; any other one is a path


@dataclass(frozen=True)
class RunCommand:
    """What a command asks of the run folder.

    Attributes:
        wanted: the folder that the config names.
        config: the resolved config.
        steps: of the stage `train`.
        unread: keys that change nothing in this run; see `changed_keys`.
    """

    wanted: Path
    config: dict[str, Any]
    steps: int
    unread: frozenset[str]

    def compared(self) -> dict[str, Any]:
        """The config as JSON has it, which each checkpoint of the run keeps."""
        found: dict[str, Any] = json.loads(json.dumps(self.config, default=str))
        return found

    def differences(self, saved: dict[str, Any]) -> str:
        """The keys that change weights and differ from those of a checkpoint of the run; empty if there are none."""
        return describe_changes(changed_keys(saved, self.compared(), self.unread))

    def origin(self) -> Path | None:
        """The run or checkpoint from which `resume=fork` or `resume=<path>` starts; None for other values."""
        resume = self.config["resume"]
        return None if resume in (AUTO, NEVER) else self.wanted if resume == FORK else Path(resume)


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and from what it starts.

    Attributes:
        path: the folder.
        messages: lines for the user.
        source: the checkpoint of another run that it starts from; None if there is none.
        command: that has chosen the folder.
    """

    path: Path
    messages: list[str]
    source: Path | None
    command: RunCommand


def choose_folder(command: RunCommand, lock: RunLock) -> RunFolder:
    """Picks the folder, takes its lock and writes the resolved config into it.

    Raises:
        ValueError: the folder cannot be made, is in use, or has checkpoints without a config; or `resume` names nothing
            that the run can start from.
    """
    origin, wanted = command.origin(), command.wanted
    folder, reasons = wanted, list[str]()
    while True:
        if not _taken(folder):
            source = None if origin is None else _source(origin, command)
            unlocked = _make(folder, lock)
            if not _taken(folder):  # no other process was faster
                break
            lock.release()
        elif command.config["resume"] == NEVER:
            reasons.append("is taken")
        elif reason := _reason_against(folder, command, origin):
            reasons.append(reason)
        else:
            return _continue(folder, command, lock)
        folder = wanted.with_name(f"{wanted.name}-{len(reasons) + 1}") if reasons else wanted
    _write_config(folder, command, source)
    messages = [unlocked, f"{wanted} {reasons[0]}. This run is in {folder}" if reasons else ""]
    return RunFolder(folder, [text for text in messages if text], source, command)


def finish_folder(folder: Path, numbers: dict[str, float]) -> None:
    """Marks a run as finished: writes the last value of every metric."""
    write_text(folder / RESULT, json.dumps(numbers, indent=1, sort_keys=True))


def finished_run(command: RunCommand) -> tuple[Path, dict[str, float]] | None:
    """The folder and the numbers of a finished run of this config, which a job of a sweep does not repeat.

    None where no run of as many steps has finished, a key differs, the metric was not measured, or `resume` is not
    `auto`.
    """
    folder, number = command.wanted, 1
    while command.config["resume"] == AUTO and _taken(folder):
        saved = read_config(folder)
        if saved is not None and _finished(folder) and not changed_keys(saved, plain(command.config), command.unread):
            numbers: dict[str, float] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            if _steps_done(folder) == command.steps and command.config["metric"] in numbers:
                return folder, numbers
        number += 1
        folder = command.wanted.with_name(f"{command.wanted.name}-{number}")
    return None


@contextmanager
def scratch(world: World, output_dir: str, mode: str) -> Iterator[Path]:
    """A temporary folder beside the run folder, on the same file system, removed after the block. A collective."""
    folder: Path = world.decide(lambda: new_folder(Path(output_dir).parent, mode))
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


def new_folder(parent: Path, name: str) -> Path:
    """Makes a folder of a new name, which begins with this one."""
    make_folder(parent)
    return Path(mkdtemp(prefix=f"{name}-", dir=parent))


def _taken(folder: Path) -> bool:
    """Whether the folder holds files; those of an evaluation before the run, a lock and half a config do not count."""
    if not folder.is_dir():
        return folder.exists()
    free = (EVALUATION, ANSWERS, RESCORED, RESCORED_ANSWERS, MEDIA, LOCK, PARTIAL_CONFIG)
    return any(path.name not in free for path in folder.iterdir())


def _make(folder: Path, lock: RunLock) -> str:
    """Makes a folder and takes its lock; see `RunLock.take`."""
    try:
        make_folder(folder)
        return lock.take(folder)
    except OSError as error:
        raise ValueError(f"output_dir: the folder {folder} cannot be made ({error}); set output_dir") from error


def _reason_against(folder: Path, command: RunCommand, origin: Path | None) -> str:
    """Why the run in a folder is not continued; empty if it is.

    Raises:
        ValueError: the folder has checkpoints, and no config that tells what they are of.
    """
    saved = read_config(folder)
    if saved is None:
        if origin is None and _newest(folder) is not None:
            raise ValueError(
                f"{folder / CONFIG} is missing or damaged, so the trainer cannot tell whether {_newest(folder)} is "
                "of this run. Restore the file; or start from this checkpoint in another folder with resume=fork, or "
                "from the beginning with resume=never"
            )
        return "is taken"
    start = start_of(saved)
    if origin is not None and (start is None or not start.is_relative_to(origin.resolve())):
        return "is taken"
    changes = changed_keys(saved, plain(command.config), command.unread)
    if not _finished(folder):
        return f"holds an unfinished run with {_cure(changes)}" if changes else ""
    done = _steps_done(folder)
    if done >= command.steps:
        return "holds a finished run"
    return f"holds a finished run of {done} steps with {_cure(changes)}" if changes else ""


def _finished(folder: Path) -> bool:
    """Whether the run has its result; a result that cannot be read is written anew."""
    try:
        return isinstance(json.loads((folder / RESULT).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def _steps_done(folder: Path) -> int:
    """The steps of the stage `train` that the run has logged."""
    return max([span.end - span.start for span in read_stages(folder) if span.name == "train"], default=0)


def _cure(changes: list[Difference]) -> str:
    words = overrides(changes)
    return f"other values: {describe_changes(changes)}" + (f". To continue it, add: {words}" if words else "")


def _continue(folder: Path, command: RunCommand, lock: RunLock) -> RunFolder:
    unlocked = lock.take(folder)
    state = "a finished run with fewer steps" if _finished(folder) else "an unfinished run of this config"
    for name in (RESULT, STOPPED):
        (folder / name).unlink(missing_ok=True)
    saved = read_config(folder)
    assert saved is not None
    source = start_of(saved)
    _write_config(folder, command, source)
    messages = [unlocked, f"{folder} holds {state}: continuing it"]
    return RunFolder(folder, [text for text in messages if text], source, command)


def _source(origin: Path, command: RunCommand) -> Path:
    """The checkpoint that `resume=fork` or `resume=<path>` names.

    Raises:
        ValueError: there is none, or its run has other keys that decide what a checkpoint holds.
    """
    key = f"resume={command.config['resume']}"
    if not origin.exists():
        words = "" if origin == command.wanted else did_you_mean(str(origin), (AUTO, NEVER, FORK))
        raise ValueError(f"{key}: there is no folder {origin}{words} (auto, never, fork, a run or a checkpoint)")
    source = origin.resolve() if origin.resolve().name.startswith("step_") else _newest(origin)
    if source is None:
        raise ValueError(f"{key}: {origin} has no checkpoint; start from the beginning with resume=never")
    saved = read_config(source.parent.parent)
    if saved is not None and (changes := unloadable_keys(saved, plain(command.config))):
        raise ValueError(f"{key}: {source} does not fit this config: {describe_changes(changes)}")
    return source


def _newest(run: Path) -> Path | None:
    """The newest checkpoint of a run folder, or of a folder of checkpoints; None if there is none."""
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    return max((path.resolve() for path in checkpoints_in(folder)), default=None)


def start_of(saved: dict[str, Any]) -> Path | None:
    """The checkpoint of another run from which a run started; None if there is none."""
    found = saved.get("resume")
    return Path(found) if isinstance(found, str) and found not in (AUTO, NEVER) else None


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of a run; None if there is none that can be read."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) and found else None


def _write_config(folder: Path, command: RunCommand, source: Path | None) -> None:
    """Writes the config; `resume` is the checkpoint that the run starts from, so that no command names it again."""
    start = {} if source is None else {"resume": str(source)}
    write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(command.config | start)))


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it is read from its file."""
    found = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config))))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
