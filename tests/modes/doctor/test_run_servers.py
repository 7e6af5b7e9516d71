"""`mode=doctor` where real servers sample; `test_run.py` has vLLM in this process."""

import pytest

from tests.modes.doctor.test_run import RUN, called
from tests.rollout.server.real_servers import QUIET, interpreter


@pytest.mark.slow
@pytest.mark.suite
def test_servers_are_sound(sized, tmp_path, monkeypatch):
    python = interpreter("sglang") or pytest.skip("RFT_SGLANG_PYTHON names no interpreter")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    small = [word for word in sized(*RUN) if "head_dim" not in word]
    own = ("rollout=sglang", "actor.model_config.head_dim=32", f"rollout.engine.servers.python={python}")
    text, well = called(tmp_path, (), *small, *own)
    assert well and "✗" not in text and " of 16 rows" in text, text  # on a CPU it heeds no seeds
    for check in ("agreement", "weights", "drift"):
        assert f"✓ {check}" in text
    assert list(tmp_path.iterdir()) == [], "nothing stays"
