"""Models of video, and Llama 4, in a process with torchvision, in the folder that RFT_TORCHVISION_DIR names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENDS_S

FOLDER = os.environ.get("RFT_TORCHVISION_DIR", "")
# Its wheel is of CUDA; without its library, the import fails on operators that it describes, and then does not need.
RUN = """
import sys, pytest, torch
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.exit(pytest.main(["-n", "0", "-x", "-p", "no:cacheprovider", "--show-capture=no", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="RFT_TORCHVISION_DIR names no folder (.ci/run prepares one)")
@pytest.mark.parametrize("file", ["video_checks.py", "llama4_checks.py"])
def test_models_whose_processor_needs_torchvision(file: str) -> None:
    pytest.importorskip("av")
    root, checks = Path(__file__).parents[2], str(Path(__file__).with_name(file))
    path = os.pathsep.join([FOLDER, str(root)])
    done = subprocess.run(
        [sys.executable, "-c", RUN, checks],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
