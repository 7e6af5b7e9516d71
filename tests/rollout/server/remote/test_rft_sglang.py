"""The key of an SGLang server is in no command line and in no log record."""

import logging
import os
import subprocess
import sys

import pytest

from rft.rollout.server.server_api import REMOTE, key_environment, python_path

# In the place of sglang.launch_server: it shows its flags, and its command line as other processes see it.
PROGRAM = """
import logging, sys
from pathlib import Path
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    logging.info("server_args=%s", sys.argv[1:])
    logging.info("%d requests", 3)
    print(sys.argv[-1] == "--api-key=-the-key", "the-key" in Path("/proc/self/cmdline").read_text())
"""


@pytest.mark.parametrize("key", ["-the-key", None])  # one with a dash would be read as another flag
def test_the_server_gets_the_key_and_shows_it_nowhere(key, tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(PROGRAM)
    path = os.pathsep.join((python_path(), str(tmp_path)))
    found = subprocess.run(
        [sys.executable, "-m", "rft_sglang", "--port", "8000"],
        env=os.environ | key_environment(key) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = "['--port', '8000', '--api-key=***']" if key else "['--port', '8000']"
    assert found.stdout.splitlines() == [f"server_args={shown}", "3 requests", f"{key is not None} False"]
    assert path.startswith(REMOTE) and logging.getLogRecordFactory() is logging.LogRecord
