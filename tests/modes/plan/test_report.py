"""What `mode=plan` prints on the command line."""

import sys

import pytest

from rft.distributed import stop
from rft.main import main
from tests.conftest import TINY


@pytest.fixture
def say(monkeypatch, capsys, tmp_path):
    """Runs the command in this process, in an empty folder, without the process group of another test."""

    def run(*arguments):
        stop()
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["rft", *arguments, "mode=plan"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path)
        main()
        return capsys.readouterr().out

    return run


def test_a_plan_of_ranks_that_are_not_here_with_the_origin_of_every_value(say, tmp_path):
    recipe = tmp_path / "mine"
    recipe.mkdir()
    (recipe / "run.yaml").write_text("defaults: [main, override strategy: bf16, _self_]\nbatch: {epochs: 2}\n")
    sizes = ("algorithm.group_size=4", "plan.ranks=2", "plan.memory_gib=1e-6", "strategy.device=cuda")
    out = say("-cd", "mine", "-cn", "run", *TINY, *sizes)
    said = [line.strip(" │├└─") for line in out.splitlines()]
    origins = said[said.index("values that differ from the default run") : said.index("work")]
    assert "batch.epochs: 2 (not 1)" in origins[origins.index("mine/run.yaml") :]
    assert "strategy.dtype: bfloat16 (not auto)" in origins[origins.index("rft/config/strategy/bf16.yaml") :]
    assert "steps: 3 (not 60)" in origins[origins.index("command line") :]
    lines = {" ".join(line.split()) for line in said}
    assert "processes 2" in lines
    assert "rows 16 a step, 8 of them on each rank" in lines
    assert any(line.startswith("optimizer steps 6: 2 in each of 3 steps") for line in lines)
    for term in ("weights", "optimizer", "activations", "kv cache", "total"):
        assert any(line.startswith(term) for line in lines), term
    assert "over 1e-06 GiB" in out
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing is written"


@pytest.mark.slow
def test_a_plan_of_pairs_counts_two_rows_each_and_none_is_stale(say):
    out = say(*TINY, "algorithm=dpo", "plan.ranks=2")
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "rows 8 a step, 4 of them on each rank" in lines  # four pairs
    assert not any(line.startswith("staleness") for line in lines)


@pytest.mark.slow
@pytest.mark.suite
def test_each_offload_option_that_is_not_set_has_the_peak_of_its_own_plan(say):
    given = (*TINY, "plan.ranks=2", "plan.prompt_tokens=8", "algorithm/terms=[kl]", "reference.path=null")
    out = say(*given, "plan.offload=true", "strategy.param_offload=frozen")
    lines = [line.split() for line in out[out.index("offload options that are not set, in MiB") :].splitlines()]
    found = {line[0]: line[1:] for line in lines if line and line[0].startswith("strategy.")}
    assert list(found) == [f"strategy.{name}" for name in ("param_offload=all", "optimizer_offload=true",
                                                           "activation_offload=true")]  # fmt: skip
    assert all(float(host) > 0 and stage in out for _, _, stage, host in found.values())
    # a run so small saves no activations: the buffers of the transfers are as large
    assert [float(saved) > 0 for _, saved, _, _ in found.values()] == [True, True, False]
    alone = say(*given, "strategy.param_offload=frozen", "strategy.optimizer_offload=true")
    assert f"The peak is {found['strategy.optimizer_offload=true'][0]} MiB" in alone and "that are not set" not in alone
