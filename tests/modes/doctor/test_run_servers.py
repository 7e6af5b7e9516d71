"""`mode=doctor` where real servers sample."""

import pytest

from tests.modes.doctor.test_run import RUN, called
from tests.rollout.server.real_servers import QUIET, interpreter

SERVERS = {
    "vllm": (["rollout=vllm_server", "+rollout.engine_args.enforce_eager=true"], "16 of 16 rows"),
    "sglang": (["rollout=sglang"], " of 16 rows"),  # on a CPU it heeds no seeds
}


@pytest.mark.slow
@pytest.mark.parametrize("package", list(SERVERS))
def test_servers_are_sound(package, sized, tmp_path, monkeypatch):
    python = interpreter(package) or pytest.skip(f"RFT_{package.upper()}_PYTHON names no interpreter")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    kind, same = SERVERS[package]
    small = [word for word in sized(*RUN) if "head_dim" not in word]
    own = ("actor.model_config.head_dim=32", f"rollout.engine.servers.python={python}")
    text, well = called(tmp_path, (), *small, *kind, *own)
    assert well and "✗" not in text and same in text, text
    for check in ("agreement", "weights", "drift"):
        assert f"✓ {check}" in text
    assert list(tmp_path.iterdir()) == [], "nothing stays"
