"""A checkpoint saves what a run remembers: the objects of a resumed run hold what those of the whole run held."""

import json
import re
from pathlib import Path

import pytest
import yaml
from torch.distributed.checkpoint.stateful import Stateful as TorchStateful

import rft
from rft.algorithm import ADVANTAGES, CONTROLS, SHAPINGS
from rft.algorithm.loss.terms import AdaptiveKL
from rft.algorithm.scores.shaping import RunningMoments
from rft.data.sampler import RowSampler
from rft.logger.history import WARNINGS
from rft.logger.log import SilentLog
from rft.setup.assembly import Job
from rft.stateful import Stateful
from rft.train.checkpoint.checkpoints import SavedState
from rft.train.diverged import NonFinitePolicy
from rft.train.ledger import Ledger
from tests.e2e.state_on_ranks import NEXT, SIZES, excepted, not_restored
from tests.e2e.test_algorithms import ALGORITHMS
from tests.helpers import ADAPTIVE, CLOCK, identical, numbers
from tests.train import skips_on_ranks  # noqa: F401  registers a loss
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Path(rft.__file__).parent / "config" / "algorithm"
# What the yaml of no algorithm has: overrides of the default.
PLUGINS = {
    "running moments, adaptive KL": ("algorithm=rloo", "algorithm/shaping=[running_norm]", *ADAPTIVE),
    "target entropy": ("algorithm/terms=[entropy_adaptive]",),
    "iterations, adapters": ("algorithm/terms=[kl]", "algorithm.iteration=2", "actor/lora=lora", "actor.lora.rank=4"),
    "prioritized": ("algorithm/source=prioritized",),
    "drop_solved": ("algorithm/source=drop_solved",),
    "weight average": ("actor.ema=0.9", "actor.optimizer.schedule=cosine"),
    "muon": ("actor.optimizer.name=muon",),
    "8-bit state": ("actor.optimizer.name=adamw_8bit",),
    "float16": ("strategy.dtype=float16",),
    "precomputed": ("algorithm=dpo", "reference.precompute=true"),
    "skipped updates": ("faults.nonfinite=skip",),
    "stream": ("algorithm=sft", "data.streaming=4"),
    "order of the file": ("algorithm=sft", "data.shuffle=false"),
    "mixture of streams": ("algorithm=sft", "data.streaming=4"),
    "within the warm-up": ("warmup.steps=4", "warmup.rows=8"),
    "behind the warm-up": ("warmup.steps=2", "warmup.rows=8", "steps=1"),
}
RUNS = {name: (f"algorithm={name}",) for name in ALGORITHMS} | PLUGINS
RUNS["vapo"] += ("algorithm.critic_warmup=1",)
QUICK = "running moments, adaptive KL"


def configured(name, tiny, tmp_path):
    """The config of a run."""
    given = RUNS[name]
    warm = () if any(override.startswith("warmup.") for override in given) else ("warmup=none",)
    config = tiny(*SIZES, f"steps={NEXT}", *warm, *given)
    config["algorithm"]["group_size"] = min(config["algorithm"]["group_size"], 4)
    if name == "skipped updates":
        config["algorithm"]["loss"] = {"name": "spoilt_updates", "versions": [1]}
    if config["data"]["streaming"] is not None:
        config["data"]["train"] = stream(tmp_path) if name == "stream" else mixture(tmp_path)
    return config


def stream(folder, name="rows", count=9):
    """Rows of a file."""
    file = folder / f"{name}.jsonl"
    rows = ({"prompt": f"{number}=", "response": str(number)} for number in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return yaml.safe_load((CONFIG.parent / "data" / "rows" / "file.yaml").read_text()) | {"path": str(file)}


def mixture(folder):
    """Rows of two files."""
    parts = {name: {"weight": 1.0, "rows": stream(folder, name, count)} for name, count in (("a", 9), ("b", 5))}
    return {"_target_": "rft.data.rows.mixture.Mixture", "parts": parts}


def end(run):
    """Metrics and the last state of a run, without what depends on the clock."""
    saved = state(run)
    saved["numbers"] = {name: number for name, number in saved["numbers"].items() if not name.startswith(CLOCK)}
    return numbers(run), saved


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_checkpoint_saves_what_a_run_remembers(name, tiny, tmp_path, monkeypatch):
    config = configured(name, tiny, tmp_path)
    ended = r"^stages\[0\]" if name == "behind the warm-up" else "$^"
    found = not_restored(config, tmp_path, monkeypatch)
    assert [place for place in found if not excepted(place) and not re.search(ended, place)] == []
    assert identical(end(tmp_path / "whole"), end(tmp_path / "parts"))
    warnings = tmp_path / "whole" / WARNINGS
    assert not warnings.exists() or "no checkpoint saves it" not in warnings.read_text()


def test_state_that_is_not_saved_is_found(tiny, tmp_path, monkeypatch, plugins_forgotten):
    history = []

    @ADVANTAGES.register("remembers")
    def remembers(scores, rewards, batch):
        history.append(float(scores.sum()))
        return {"advantages": (scores - sum(history) / len(history))[:, None] * batch["loss_mask"]}

    for kind in (RowSampler, RunningMoments, AdaptiveKL, NonFinitePolicy, Ledger):
        monkeypatch.setattr(kind, "load_state_dict", lambda *_: None)
    config = configured(QUICK, tiny, tmp_path)
    config["algorithm"]["advantage"] = {"name": "remembers"}
    found = not_restored(config, tmp_path, monkeypatch)
    for place in (
        "stages[0].source.row_sampler.position",
        "stages[0].algorithm.shaping_states['running_norm'].count",
        "stages[0].algorithm.reward_control.coef",
        "stages[0].algorithm.policy.terms[1].coef.coef",
        "trainer.watch.nonfinite._in_a_row['actor']",
        "trainer.ledger._stages['train']['trained'][0]",
    ):
        assert place in found and not excepted(place)
    warning = f"the advantage 'remembers' changes the variable {__name__}.history while it trains, and no checkpoint"
    assert warning in (tmp_path / "whole" / WARNINGS).read_text()


@pytest.mark.slow
def test_every_rank_holds_its_part_again(tiny, tmp_path, torchrun):
    waits = ("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "seed=1", "actor.ema=0.9", "strategy.device=cpu")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny(*SIZES, f"steps={NEXT}", "warmup=none", *waits)))
    torchrun(Path(__file__).parent / "state_on_ranks.py", file, tmp_path)
    for rank in (0, 1):
        places = json.loads((tmp_path / f"places_{rank}.json").read_text())
        assert [place for place in places if not excepted(place)] == [] != places
    saved = SavedState(tmp_path / "whole" / "checkpoints" / f"step_{NEXT - 1:08d}")
    assert saved["source"]["surplus"], "groups wait for the last step"
    assert identical(end(tmp_path / "whole"), end(tmp_path / "parts"))


def test_every_plugin_that_may_remember_is_in_a_run():
    files = [CONFIG / f"{name}.yaml" for name in (*ALGORITHMS, "_base", "_policy_gradient")]
    typed = " ".join(override for overrides in PLUGINS.values() for override in overrides)
    chosen = {name for file in files for name in re.findall(r"\bsource: (\w+)", file.read_text())}
    chosen |= set(re.findall(r"algorithm/source=(\w+)", typed))
    target = {file.stem: yaml.safe_load(file.read_text())["_target_"] for file in CONFIG.glob("source/*.yaml")}
    assert {target[name] for name in chosen} == set(target.values())
    remember = [name for name in SHAPINGS.names() if "state" in SHAPINGS._entries[name][1]]
    assert all(name in typed for name in remember) and remember == ["running_norm"]
    options = re.findall(r"algorithm/(\w+)=\[?(\w+)", typed)
    texts = " ".join((CONFIG / group / f"{name}.yaml").read_text() for group, name in options)
    assert all(f"name: {name}\n" in texts for name in CONTROLS.names())


def test_every_part_has_the_protocol_of_torch(tiny, tmp_path):
    job = Job(tiny("algorithm=rloo", "algorithm/shaping=[running_norm]", *ADAPTIVE))
    world = job.join()
    trainer, stages = job.assemble(world, job.prepare(world), tmp_path, SilentLog())
    trainer.sampler.close()
    algorithm, models = stages[-1].algorithm, trainer.models.values()
    terms = [term.coef for term in algorithm.policy.terms]
    inner = [*models, *algorithm.shaping_states.values(), algorithm.reward_control, *terms]
    for part in (*trainer.parts.values(), *(part for stage in stages for part in stage.parts.values()), *inner):
        assert isinstance(part, Stateful) and isinstance(part, TorchStateful)
