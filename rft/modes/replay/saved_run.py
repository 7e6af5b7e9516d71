"""What mode=replay reads of the folder of a run: its config, its checkpoints and what it has logged."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.algorithm.roles import ROLES
from rft.logger.history import History
from rft.setup.assembly import Job
from rft.train.checkpoint.manifest import damage
from rft.train.checkpoint.names import checkpoints_in, step_of
from rft.train.folder.resume import Difference, below, changed_keys, describe_changes, overrides
from rft.train.folder.run_folder import CHECKPOINTS, CONFIG, plain, read_config, start_of

ALGORITHM = "algorithm"
# Keys of the algorithm that may not differ, each with the reason.
OF_THE_RUN = {
    "algorithm.source": "it makes the rows",
    "algorithm.group_size": "the rows are sampled with it",
    "algorithm.sampler": "the rows are sampled with its weights",
    "algorithm.iteration": "it replaces weights between steps",
    "algorithm.schedules": "they choose the models that train",
    "algorithm.critic_warmup": "it chooses the models that train",
}


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run.

    Attributes:
        folder: is only read.
        config: its `config.yaml`.
    """

    folder: Path
    config: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> "SavedRun":
        """Reads a run folder.

        Raises:
            ValueError: it holds no run.
        """
        config = read_config(folder)
        if config is None:
            raise ValueError(
                f"mode=replay: output_dir={folder} holds no run with a {CONFIG}; set output_dir to the folder of a run"
            )
        return cls(folder, config)

    def logged(self, step: int) -> dict[str, float | None]:
        """The numbers of a step of the stage `train`.

        Raises:
            ValueError: the run has not logged such a step.
        """
        rows = {row["step"]: row for row in History.of(self.folder).rows() if row["step"] > 0}
        steps = [number for number, row in rows.items() if row["stage"] == "train"]
        if step not in rows or not steps:
            known = f"it has logged the steps {min(steps)} to {max(steps)} of them" if steps else "it has logged none"
            raise ValueError(f"replay.step={step} is no step of the stage train of {self.folder}; {known}")
        if rows[step]["stage"] != "train":
            raise ValueError(
                f"replay.step={step} is a step of the warm-up, which the algorithm does not train; choose one from "
                f"{min(steps)} to {max(steps)}"
            )
        return {name: value for name, value in rows[step].items() if name not in ("step", "stage")}

    def start(self, step: int) -> tuple[Path | None, dict[Path, str]]:
        """The newest checkpoint before a step that is whole, or None for the beginning of the run.

        Returns:
            The checkpoint, and what is wrong with newer ones that are damaged.
        """
        before = [path for path in checkpoints_in(self.folder / CHECKPOINTS) if step_of(path) < step]
        problems: dict[Path, str] = {}
        for path in reversed(before):
            if (problem := damage(path)) is None:
                return path, problems
            problems[path] = problem
        return start_of(self.config), problems

    def changes(self, config: Mapping[str, Any], unread: Collection[str]) -> list[Difference]:
        """The keys of the algorithm in which a command differs from the run.

        Args:
            config: of the command, as files hold it.
            unread: keys that the run does not read.

        Raises:
            ValueError: it differs in another key that changes weights; names the keys.
        """
        changes = changed_keys(self.config, plain({**config, "mode": self.config["mode"]}), unread)
        if wrong := [change for change in changes if not below(change[0], (ALGORITHM,))]:
            words = overrides(wrong)
            cure = f". Add: {words}" if words else "; take them out"
            raise ValueError(
                f"mode=replay: only keys of algorithm may differ from {self.folder}, whose rows and weights the step "
                f"takes; there, other values are {describe_changes(wrong)}{cure}"
            )
        for change in changes:
            if reason := next((OF_THE_RUN[key] for key in OF_THE_RUN if below(change[0], (key,))), ""):
                raise ValueError(f"mode=replay: {describe_changes([change])} may not differ from the run: {reason}")
        return changes


def check_columns_known(run: Job, command: Job) -> None:
    """Checks that the run has every column that the algorithm of the command reads.

    Raises:
        ValueError: names the column and what writes it.
    """
    before, reads = run.algorithm.reads(), command.algorithm.reads()
    for role in ROLES:
        if role.writes(reads) and not role.writes(before):
            raise ValueError(
                f"mode=replay: the algorithm reads {' and '.join(role.writes(reads))} of the {role.key}, a model that "
                f"the run does not have; choose an algorithm without {role.key}"
            )
    if missing := sorted((reads - before) & set(run.facts.writes_if_read)):
        raise ValueError(
            f"mode=replay: the algorithm reads {' and '.join(missing)}, which the run has not sampled; choose one "
            "that does not"
        )
