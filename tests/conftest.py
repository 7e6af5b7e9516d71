"""What tests of several folders share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import rft

CONFIG = Path(rft.__file__).parent / "config"
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
    "reward.terms.format.weight=1.0",
    "rollout.max_new_tokens=6",
    "batch.prompts=4",
    "steps=3",
)
TINY_GROUPS = ("algorithm.group_size=4",)
TINY_WARMUP = ("warmup.steps=2", "warmup.rows=8")


@pytest.fixture(scope="session")
def resolved():
    """Composes a config as the command line does, and resolves it to plain containers."""

    def resolve(*overrides: str, folder: Path = CONFIG, name: str = "main") -> dict:
        # as with -cd: the folder is where the config is looked for first, then the package's own
        extra = [] if folder == CONFIG else [f"hydra.searchpath=[file://{CONFIG}]"]
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(name, [*overrides, *extra])
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)

    return resolve


@pytest.fixture
def tiny(resolved, tmp_path):
    """The resolved config of a tiny run in `tmp_path`, with the overrides on top."""

    def resolve(*overrides: str) -> dict:
        supervised = "algorithm=sft" in overrides
        sizes = [*TINY, *(() if supervised else TINY_GROUPS)]
        if not supervised and "warmup=none" not in overrides:
            sizes += TINY_WARMUP
        return resolved(*sizes, f"output_dir={tmp_path / 'run'}", *overrides)

    return resolve


@pytest.fixture(scope="session")
def torchrun():
    """Runs a script on two processes of this machine, on the CPU; fails with what they said."""

    def run(script: Path, *arguments: object) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        root = str(Path(rft.__file__).parent.parent)
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        found = subprocess.run(
            [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert found.returncode == 0, found.stdout + found.stderr

    return run
