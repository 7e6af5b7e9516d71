"""The watch of a long run: what it counts, and which counts grow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import soak


def test_what_a_process_has_is_counted(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "one").write_text("")
    own = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", own], stdin=subprocess.PIPE) as process:
        while len(list(soak.children(process.pid))) < 1:
            assert process.poll() is None
        found = soak.sample(process.pid, tmp_path, 0)
        process.communicate(b"\n")
    assert found["child processes"] == 1 and found["temporary files"] == 1 and found["threads"] >= 1
    assert found["memory, MiB"] > 1 and found["descriptors"] >= 3
    assert soak.sample(process.pid, tmp_path, 0) == {}, "it has ended"
    assert os.getpid() not in soak.children(os.getpid())


def test_a_count_that_is_higher_in_the_last_part_grew():
    found = [(step / 10, {"memory, MiB": 100 + step // 7 * 6, "threads": 3 + step // 7}) for step in range(11)]
    first, last = soak.part(found, 0.2, 0.5), soak.part(found, 0.7, 1)
    assert (first, last) == ({"memory, MiB": 100, "threads": 3}, {"memory, MiB": 106, "threads": 4})
    assert soak.grew("threads", 3, 4) and not soak.grew("threads", 4, 4)
    assert soak.grew("memory, MiB", 100, 106) and not soak.grew("memory, MiB", 100, 105)
    with pytest.raises(SystemExit, match="take more --steps"):
        soak.part(found[:1], 0.5, 1)


def test_the_step_is_that_of_the_last_whole_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert soak.last_step(metrics) == 0
    metrics.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(3000)) + '{"step": 9')
    assert soak.last_step(metrics) == 2999
