"""Checkpoints: what a run writes so that it can be resumed, and so that its model can be used."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from rft.distributed import World
from rft.logger.disk import HeldFolder, rename, sync
from rft.train.checkpoint.manifest import damage, describe, files_of, read_manifest, write_manifest
from rft.train.checkpoint.names import checkpoints_in, delete, make_empty, name_of, remove, set_aside
from rft.train.checkpoint.options import CheckpointOptions
from rft.train.checkpoint.saved_state import STATE, STRUCTURE, SavedState, structure_of
from rft.train.checkpoint.shards import Stager, reason_of, save_tensors
from rft.train.checkpoint.tree import split
from rft.train.folder.run_folder import RunFolder, new_folder
from rft.waits import waiting

CLOSE_S = 60.0  # seconds that an error of the run waits for a checkpoint that is being written
LATEST = "latest"
EXPORT_ERRORS = (OSError, SafetensorError)  # a full disk is one of them
WRITE_ERRORS = (*EXPORT_ERRORS, RuntimeError, CheckpointException)  # or of torch.distributed.checkpoint


class Checkpoints:
    """The folder `checkpoints/` of a run.

    A checkpoint is a folder `step_00000010`: tensors in `*.safetensors`, of which each rank writes its shards, all else
    in `state.json`, the policy as a Hugging Face model in `actor/`, and `MANIFEST.json` with the hash of each file.
    `latest` links to the newest. A folder gets its name when all of it is on the disk.

    The run waits while its tensors are copied to the memory of the CPU, and while the model is exported. A thread
    writes the rest, and the next checkpoint waits for it.

    Args:
        run: the run folder.
        options: when to save and what to keep.
        world: rank zero names and removes folders.
        watched: the metric that makes a checkpoint the best; of a loss or a perplexity the lowest value is.
        warn: is called on every rank with what went wrong while a checkpoint was written or read.
        chosen: the folder with the command and the checkpoint to start from; None where no run is continued.
    """

    def __init__(
        self,
        run: Path,
        options: CheckpointOptions,
        world: World,
        watched: str,
        warn: Callable[[str], None],
        chosen: RunFolder | None = None,
    ) -> None:
        self.run = run
        self.folder = run / "checkpoints"
        self._options = options
        self._world = world
        self.watched = watched
        self._warn = warn
        self._source = None if chosen is None else chosen.source
        self._command = None if chosen is None else chosen.command
        self._stager = Stager(world.device)
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[str | None] | None = None
        self._written, self._writer = 0, 0  # the step of the last checkpoint, and the thread that writes it
        self._problem: str | None = None  # why the last checkpoint could not be written
        self._held = HeldFolder(run) if world.rank == 0 else None

    def due(self, step: int) -> bool:
        """True where a checkpoint is to be written after this step."""
        return self._options.every > 0 and step % self._options.every == 0

    def latest(self) -> Path | None:
        """The newest checkpoint, or the one that the run started from, or None."""
        return max(checkpoints_in(self.folder), default=self._source)

    def read(self) -> SavedState | None:
        """The state of the newest checkpoint that is whole, or None where there is no checkpoint. A collective.

        A damaged checkpoint is renamed and named in a warning, and the one before it is read.

        Raises:
            ValueError: all checkpoints are damaged, or `checkpoints` is no folder; names what is wrong with each.
        """
        self._world.decide(self._clear)
        steps: list[Path] = self._world.decide(lambda: checkpoints_in(self.folder)[::-1])
        problems: dict[Path, str] = {}
        for folder in steps:
            if (problem := self._damage(folder)) is None:
                self._set_aside_all(problems, folder)
                return SavedState(folder)
            problems[folder] = problem
        if problems:
            found = "; ".join(f"{folder.name}: {text}" for folder, text in problems.items())
            raise ValueError(
                f"every checkpoint in {self.folder} is damaged ({found}); restore one, or set resume=never to start "
                "again"
            )
        if self._source is None:
            return None
        if (problem := self._damage(self._source)) is not None:
            raise ValueError(f"resume: the checkpoint {self._source} is damaged: {problem}; choose another one")
        return SavedState(self._source)

    def write(
        self,
        step: int,
        state: dict[str, Any],
        save_model: Callable[[Path, torch.dtype | None], None],
        metric: float | None,
        last: bool,
    ) -> None:
        """Copies a state and begins to write it as a checkpoint. The run may change the tensors then. A collective.

        What cannot be written is a warning, and the checkpoints before stay.

        Args:
            save_model: writes the model into a folder, in a dtype or that of its files. A collective.
            metric: the value of the watched metric, where it was measured.
            last: of a stage.

        Raises:
            ValueError: the run folder has been removed or renamed; says where the checkpoint is instead.
        """
        self.wait()
        self._written, self._problem = step, None
        self._check_folder(lambda: self.write(step, state, save_model, metric, last))
        partial = self.folder / f".{name_of(step)}.partial"
        tree, tensors = split(state)
        tensors["step"] = torch.tensor([step])  # so that there is a tensor, and each rank takes part
        problem: str | None = None
        try:
            self._world.decide(lambda: make_empty(partial))
            if last or self._exports(step):
                save_model(partial / "actor", self._options.dtype())
        except EXPORT_ERRORS as error:
            problem = reason_of(error)
        self._problem = next((text for text in self._world.gather(problem) if text is not None), None)
        if self._problem is not None:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            self._warn(self._failure(self._problem))
            return
        staged = self._stage(tensors)
        if self._group is None:
            self._group = self._world.new_group(backend="gloo")
        facts: dict[str, Any] = {"step": step, "metric": metric, "ranks": self._world.size, "torch": torch.__version__}
        facts["extra"] = not last and not self.due(step)
        if self._command is not None:
            facts["config"] = self._command.compared()
        self._writing = self._thread.submit(self._finish, partial, tree, staged, facts)

    def wait(self) -> bool:
        """Waits until the last checkpoint is on the disk. A collective. True unless it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            work = f"the writing of the checkpoint of step {self._written}"
            first = self._world.rank == 0
            saying = waiting(f"the run waits for {work} to {self.folder}") if first else nullcontext()
            with self._world.wait.during(work, self._writer or None), saying:
                self._problem = writing.result()
            if self._problem is not None:
                self._warn(self._failure(self._problem))
        return self._problem is None

    def wait_before(self, step: int, say: Callable[[str], None]) -> dict[str, float]:
        """Waits for the last checkpoint before that of a step. A collective.

        Args:
            say: prints a message for the user.

        Returns:
            The seconds of the wait, as a metric.
        """
        started = time.perf_counter()
        if self._writing is not None and not self._writing.done():
            say(f"the checkpoint of step {step} waits for that of step {self._written}, which is still being written")
        self.wait()
        return {"time/checkpoint_wait_s": time.perf_counter() - started}

    def end(self, save: Callable[[], None], cause: str = "") -> None:
        """Waits until the last checkpoint of the run is on the disk. A collective.

        Args:
            save: calls `write` for this checkpoint again.
            cause: the error that ends the run; empty if there is none.

        Raises:
            ValueError: it could not be written to the run folder; says where it is instead, and the cause.
        """
        self.wait()
        self._check_folder(save, cause)
        if self._problem is not None:
            raise ValueError(self._rescue(save, cause, self._problem))

    def _check_folder(self, save: Callable[[], None], cause: str = "") -> None:
        """Raises a ValueError where another folder than that of the run, or none, has its name. A collective."""
        if self.folder.parent == self.run and self._world.decide(lambda: self._held is not None and self._held.moved()):
            raise ValueError(self._rescue(save, cause, f"{self.run} was removed or renamed while the run wrote to it"))

    def _rescue(self, save: Callable[[], None], cause: str, problem: str) -> str:
        """Writes the last checkpoint to the folder `fallback`; returns the message of the end. A collective.

        Args:
            save: writes this checkpoint to `folder`.
            problem: why it is not in the run folder.
        """
        folder, fallback, before = self.folder, self._options.fallback, self.latest()
        message = f"{cause}{'; ' if cause else ''}the last checkpoint could not be written to {folder} ({problem})"
        reason: str | None = "checkpoint.fallback=null"
        if fallback is not None:
            try:
                self.folder = self._world.decide(lambda: new_folder(Path(fallback).expanduser(), self.run.name))
                self._warn = lambda text: None  # the message of the end has it
                save()
                reason = None if self.wait() else f"checkpoint.fallback={fallback}: {self._problem}"
            except OSError as error:
                reason = f"checkpoint.fallback={fallback}: {reason_of(error)}"
        if reason is None:
            saved = self.folder / name_of(self._written)
            return (
                f"{message}, and is in {saved} (checkpoint.fallback). Free space on the disk, or restore the run "
                f"folder; move the checkpoint to {folder}, and run the same command again: it continues from there. Or "
                f"start from it in another folder: add resume={saved} and output_dir=<folder>"
            )
        if self._world.rank == 0 and self.folder != folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        start = "from the beginning" if before is None else f"from {before}"
        return (
            f"{message}, nor elsewhere ({reason}). Free space on the disk, or set checkpoint.fallback to a folder on "
            f"another disk, and run the same command again: it continues {start}"
        )

    def close(self) -> None:
        """Lets a checkpoint that is being written get onto the disk after an error of the run, if that is soon."""
        if self._held is not None:
            self._held.close()
        self._thread.shutdown(wait=False)
        writing = [] if self._writing is None else [self._writing]
        late = wait(writing, CLOSE_S).not_done  # where another rank, whose part is missing, has ended
        if self._group is not None and not late:
            dist.destroy_process_group(self._group)  # frees its file descriptors
            self._group = None

    def _exports(self, step: int) -> bool:
        """True where a checkpoint has the model: the step alone decides, so a resumed run exports the same ones."""
        between = self._options.every * self._options.export_every
        return self._options.export_every == 1 or (between > 0 and step % between == 0)

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint, or None; the ranks share the files. A collective."""
        found = self._world.gather(damage(folder, self._world.rank, self._world.size))
        problem = next((text for text in found if text is not None), None)
        return self._foreign(folder) if problem is None and folder != self._source else problem

    def _foreign(self, folder: Path) -> str | None:
        """Why a whole checkpoint is not that of the run whose name and place it has, or None."""
        facts = read_manifest(folder)
        if name_of(facts["step"]) != folder.name:
            return f"it is the checkpoint of step {facts['step']}"
        if self._command is None or "config" not in facts:
            return None
        changes = self._command.differences(facts["config"])
        return f"it is of another run: {changes}" if changes else None

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors on the CPU."""
        spread = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        with record_function("checkpoint"):
            whole = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items() if name not in spread}
            staged = self._stager.stage(spread)
        return staged | {name: tensor.contiguous() for name, tensor in whole.items()}

    def _finish(self, partial: Path, tree: Any, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> str | None:
        """Writes a checkpoint in the thread of this rank; the problem if that fails, on every rank."""
        rank, size, group = self._world.rank, self._world.size, self._group
        assert group is not None
        self._writer = threading.get_ident()
        problem, files = None, dict[str, Any]()
        try:
            save_tensors(tensors, partial, group)
            if rank == 0:
                (partial / STATE).write_text(json.dumps(tree), encoding="utf-8")
        except WRITE_ERRORS as error:
            problem = reason_of(error)
        dist.barrier(group)
        try:
            for name in files_of(partial)[rank::size]:
                sync(partial / name)
                files[name] = describe(partial / name)
        except OSError as error:
            problem = problem or reason_of(error)
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (problem, files), group=group)
        problem = next((text for text, _ in found if text is not None), None)
        if rank == 0 and problem is None:
            try:
                facts[STRUCTURE] = structure_of(tree)
                self._complete(partial, {name: value for _, part in found for name, value in part.items()}, facts)
            except OSError as error:
                problem = reason_of(error)
        outcome = [problem]
        dist.broadcast_object_list(outcome, src=0, group=group)
        if outcome[0] is None:
            return None
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        return str(outcome[0])

    def _complete(self, partial: Path, files: dict[str, Any], facts: dict[str, Any]) -> None:
        """Seals the folder, gives it its name, moves `latest` and removes what is not kept."""
        write_manifest(partial, files, facts)
        final = partial.parent / name_of(facts["step"])
        if os.path.lexists(final):
            remove(final)
        rename(partial, final)
        self._link(final)
        self._prune()

    def _failure(self, problem: str) -> str:
        before = self.latest()
        stays = f"{before} stays the newest" if before is not None else "there is none before it"
        return (
            f"the checkpoint of step {self._written} could not be written ({problem}); {stays}, and the run continues"
        )

    def _clear(self) -> None:
        """Removes what a run that was killed has left of a checkpoint that it wrote or was removing."""
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise ValueError(
                f"{self.folder} is not a folder, or links to a folder that is not there; restore or remove it"
            )
        for path in self.folder.glob(".*"):
            delete(path)

    def _set_aside_all(self, problems: Mapping[Path, str], chosen: Path) -> None:
        """Renames damaged checkpoints with a warning, links to the chosen one, and prunes. A collective."""

        def rename_all() -> list[str]:
            names = [set_aside(folder) for folder in problems]
            self._link(chosen)
            self._prune()
            return names

        for (folder, problem), name in zip(problems.items(), self._world.decide(rename_all), strict=True):
            self._warn(f"the checkpoint {folder} is damaged: {problem}; it is renamed to {name}")

    def _link(self, folder: Path) -> None:
        link, latest = self.folder / f".{LATEST}.partial", self.folder / LATEST
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        if latest.is_dir() and not latest.is_symlink():  # a copy of the run that followed the link
            name = set_aside(latest)
            self._warn(f"{latest} is a folder, not a link to the newest checkpoint; it is renamed to {name}")
        rename(link, latest)

    def _prune(self) -> None:
        """Removes the checkpoints that are not kept; damaged ones are neither counted nor removed."""
        facts: dict[Path, dict[str, Any]] = {}
        for path in checkpoints_in(self.folder):
            try:
                facts[path] = read_manifest(path)
            except ValueError:
                continue
        kept = self._options.kept(facts, self.watched)
        for path in facts.keys() - kept:
            remove(path)
