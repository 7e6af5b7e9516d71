"""The entry point: composes the config, checks it, and runs the mode that it names.

    python -m rft.main
    python -m rft.main algorithm=gspo algorithm.loss.clip_high=4e-4
    python -m rft.main -m algorithm=grpo,gspo,dapo seed=0,1
    torchrun --nproc-per-node 8 -m rft.main -cd recipes/gsm8k -cn run

No slow module is imported before the config is composed, so `--help` and `--cfg job` are fast.
"""

import os
import re
import sys
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from rft.errors import Problems, Stopped, did_you_mean, report_to_torchrun
from rft.logger.redact import resolve
from rft.modes import find_mode
from rft.redaction import redact, redact_log_records, redact_tracebacks
from rft.sanitize import printable
from rft.setup.other_libraries import elsewhere
from rft.setup.yaml_errors import YAML_ERRORS, broken_yaml

CONFIG_FOLDER = Path(__file__).parent / "config"
HYDRA_FOLDER = Path(hydra.__file__).parent / "conf"  # the options of Hydra itself
INTERRUPTED = 130  # exit status after SIGINT, as a shell has it
STOPPED = os.EX_TEMPFAIL  # 75: exit status of a run that has stopped and can be continued
OF_ANY_TERM = re.compile(r"reward\.terms\.\w+\.(call|gate|clip)\b")  # keys that few yaml files of terms contain
USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)


class JobFailed(BaseException):
    """Carries the error of the only job of a command past Hydra, which prints the overrides before an `Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="main")
def run(config: DictConfig) -> float:
    """Runs one job and returns the metric that its config names."""
    try:
        return run_job(config)
    except USER_ERRORS as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:  # the other jobs run first, and Hydra names the one that failed
            raise
        raise JobFailed(error) from error


def run_job(config: DictConfig) -> float:
    """Resolves the config and calls the mode that it names."""
    job = HydraConfig.get()
    for source in job.runtime.config_sources:
        recipe = Path(source.path) / f"{str(job.job.config_name).removesuffix('.yaml')}.yaml"
        if source.provider == "command-line" and recipe.is_file():  # with -cd alone the folder only adds options
            check_recipe(recipe)
    redact_tracebacks()
    plain = resolve(config)
    redact_log_records()
    console = Console(quiet=os.environ.get("RANK", "0") != "0", markup=False)
    mode = find_mode(plain["mode"])
    from rft.actor.loading.paths import with_folders
    from rft.train.folder.settled import settle  # imports torch

    if chosen := settle(config):
        plain = resolve(config)
        for line in filter(None, chosen.values()):
            console.print(line, highlight=False, soft_wrap=True)
    return mode(with_folders(plain, partial(console.print, highlight=False, soft_wrap=True)), console)


def main() -> None:
    """Runs `run`. A mistake of the user is printed as one message, a bug of this package as a traceback. After an
    interrupt it prints nothing: the log of a run has done so. The exit status of a run that can be continued is
    `STOPPED`; under torchrun, which would take that for a failure, it is 0."""
    given, flags = get_args_parser().parse_known_intermixed_args(sys.argv[1:])
    if flags:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error:", "bold red"), f" {unknown_flag(flags[0])}"))
        sys.exit(2)
    # Hydra itself accepts flags only before the overrides.
    sys.argv[1:] = [*(word for word in sys.argv[1:] if word not in given.overrides), *given.overrides]
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    error: Exception | None = None
    status = 0
    try:
        if given.config_dir:
            sys.path.insert(0, str(Path(given.config_dir).resolve()))  # the folder of the recipe's plugins
            first = CONFIG_FOLDER.parent / (given.config_path or CONFIG_FOLDER.name)
            check_names((HYDRA_FOLDER, first), Path(given.config_dir))
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Stopped:  # the log of the run has printed how to continue; the other jobs of a sweep do not start
        status = 0 if "TORCHELASTIC_RUN_ID" in os.environ else STOPPED
    except JobFailed as failed:
        error = failed.error
    except YAML_ERRORS as raised:  # a UnicodeDecodeError is a ValueError, but names no file
        found = broken_yaml((given.config_dir, given.config_path))
        if found is None and isinstance(raised, RecursionError):
            raise
        error = ValueError(found or " ".join(str(raised).split()))  # a yaml elsewhere, such as that of a resumed run
    except USER_ERRORS as raised:
        error = raised
    finally:
        if isinstance(bug := sys.exception(), Exception):
            report_to_torchrun(redact(f"{type(bug).__name__}: {bug}"), late=False)
    if error is not None:
        text = printable(redact(explain(error)))
        report_to_torchrun(text, late=type(error).__name__ == "PeerError")
        if full_error:
            raise error
        rank = os.environ.get("RANK")
        where = f"rank {rank}: " if rank is not None else ""
        message = Text.assemble((f"{where}error:", "bold red"), f" {text}")  # no markup: it has brackets
        Console(stderr=True, soft_wrap=True).print(message)
        sys.exit(1)
    if "RANK" in os.environ:
        from rft.distributed import leave

        leave(status)
    if status:
        sys.exit(status)


def check_names(before: Iterable[Path], added: Path) -> None:
    """Checks that Hydra finds no other file in the place of a yaml file of an added folder.

    Args:
        before: the folders that Hydra searches before it.
        added: the folder of `-cd`.

    Raises:
        Problems: names both files for every name that they share.
    """
    pairs = [(file, added / file.relative_to(folder)) for folder in before for file in sorted(folder.rglob("*.yaml"))]
    hidden = [(file, own) for file, own in pairs if own.is_file() and not own.samefile(file)]
    if hidden:
        raise Problems(
            f"{own}: Hydra would read {file} in its place, which has the same name; rename your file"
            for file, own in hidden
        )


def unknown_flag(flag: str) -> str:
    """The message for a flag that neither this package nor Hydra has."""
    name = flag.lstrip("-").split("=")[0]
    ours = elsewhere(name) or "key=value"
    return f"{flag}: no such flag; options are keys without dashes: {ours} (--help lists them)"


def explain(error: Exception) -> str:
    """One message for the user: this package's own unchanged, those of Hydra with the closest known key."""
    text = str(error).strip()
    if not text and isinstance(error.__cause__, Exception):  # Hydra's own if a yaml cannot be read
        return explain(error.__cause__)
    if isinstance(error, Problems) and len(error.messages) > 1:
        return "".join([f"{len(error.messages)} mistakes", *(f"\n{n}. {m}" for n, m in enumerate(error.messages, 1))])
    if isinstance(error, ValueError) and not isinstance(error, HydraException | OmegaConfBaseException):
        return text
    if found := re.search(r"Could not override '([^']+)'", text):
        key, known = found[1].split("@")[0], known_keys()
        if key in known:
            group = key.split(".")[0]
            return f"{key}: the selected options have no such key; another option of {group} has it"
        if (ours := elsewhere(key)) is not None:
            return f"{key}: no such key; here it is {ours} (docs/elsewhere.md)"
        if (found := OF_ANY_TERM.match(key)) and (found[1] != "call" or f"reward.call{key[found.end() :]}" in known):
            return f"{key}: the yaml of this term does not have the key; add it with +{key}"
        return f"{key}: no such key{did_you_mean(key, known)}"
    if found := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)':\s+(.*)", text, re.DOTALL):
        name, group, options = found[1].rsplit("/", 1)[-1], found[2], re.findall(r"^\s*(\S+)$", found[3], re.MULTILINE)
        options = [option for option in options if not option.startswith("_")]  # others inherit such a yaml
        return f"{group}={name}: no such option{did_you_mean(name, options)} (known: {', '.join(options)})"
    if found := re.search(r"Missing mandatory value: (\S+)(?:\s+full_key: (\S+))?", text):
        key = found[1] if "." in found[1] or not found[2] else found[2]  # that of an interpolation is the full key
        return f"{key} is missing: set {key}=<value>"
    if found := re.search(r"^(.*?)\s+full_key: (\S+)", text, re.DOTALL):
        return f"{found[2]}: {found[1]}"
    return text


@cache
def known_keys() -> list[str]:
    """All keys and groups that the command line may name."""
    keys = []
    for path in CONFIG_FOLDER.rglob("*.yaml"):
        folder = path.parent.relative_to(CONFIG_FOLDER).parts
        if folder == ("modes",):  # each file is the node of one mode
            keys += [path.stem, *_leaves(OmegaConf.load(path), path.stem)]
        else:
            keys += ["/".join(folder)] if folder else []
            keys += _leaves(OmegaConf.load(path), ".".join(folder))
    return sorted(set(keys))


def _leaves(node: object, prefix: str) -> list[str]:
    if not isinstance(node, DictConfig):
        return [prefix]
    names = [str(name) for name in node if name != "defaults"]
    below = [leaf for name in names for leaf in _leaves(node._get_node(name), f"{prefix}.{name}".lstrip("."))]
    return [prefix, *below] if prefix else below


def check_recipe(path: Path) -> None:
    """Rejects options of a loss or an advantage in a recipe's body: they would apply to any loss that is selected.

    Raises:
        ValueError: names the file and the key.
    """
    body = OmegaConf.load(path)
    algorithm = body.get("algorithm") if isinstance(body, DictConfig) else None
    for part in ("loss", "advantage"):
        if isinstance(algorithm, DictConfig) and part in algorithm:
            raise ValueError(
                f"{path}: the body sets algorithm.{part}; the value would apply to any {part} that is selected. Put "
                f"it into an option file {path.parent}/algorithm/{part}/<name>.yaml and select that in the defaults"
            )


if __name__ == "__main__":
    main()
