"""A run from a copy of the package in which no part is left."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.architecture.parts import files_of_parts
from tests.architecture.rules import modules
from tests.test_architecture import ROOT

RUN_S = 600.0  # a run of two steps ends within it on the busiest machine


@pytest.mark.slow
def test_the_default_run_trains_without_any_part(sized, tmp_path):
    taken = {file for files in files_of_parts(ROOT).values() for file in files}
    left = [path for path in (ROOT / "rft").rglob("*") if path.is_file() and path not in taken]
    for path in left:
        if "__pycache__" not in path.parts:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    assert len(modules(tmp_path)) == len(modules(ROOT)) - len(taken)
    command = [sys.executable, "-m", "rft.main", *sized("steps=1", "output_dir=run")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_S)
    assert found.returncode == 0, found.stdout + found.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"config.yaml", "metrics.jsonl", "result.json"}
