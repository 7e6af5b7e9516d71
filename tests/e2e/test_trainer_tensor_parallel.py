"""Whole runs: two processes that split the matrices of the blocks, or the experts, train what one trains."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft.setup.assembly import Job
from tests.train.checkpoint.states import state

# A large eps of AdamW: with a small one the sign of a gradient that is nothing but rounding moves a weight.
GIVEN = ("steps=2", "warmup=none", "strategy.device=cpu", "batch.prompts=6", "batch.minibatches=2",
         "checkpoint.every=2", "actor.optimizer.lr=1e-2", "actor.optimizer.eps=1e-4", "actor.micro_batch_tokens=128",
         "rollout.max_new_tokens=12", "seed=1", "data.eval.heldout.count=2")  # fmt: skip
RUNS = {
    "a reference, shared prefixes": ("algorithm=grpo", "algorithm/terms=[kl]", "actor.share_prefix=true"),
    "a critic": ("algorithm=ppo", "algorithm.group_size=4"),
    "adapters": ("algorithm=grpo", "actor/lora=lora", "actor.lora.rank=3"),
    "experts": (
        "algorithm=grpo",
        "actor.model_config.model_type=mixtral",
        "+actor.model_config.num_local_experts=4",
        "algorithm/terms=[router_balance]",
    ),
}
SPLIT = {"experts": "strategy.expert_parallel=2"}


@pytest.fixture(scope="module")
def runs(resolved, sized, torchrun, tmp_path_factory):
    """Folders of every run: `alone`, and `split` over two ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folders = {name: tmp_path_factory.mktemp("runs") for name in RUNS}
    configs = []
    for name, overrides in RUNS.items():
        given = sized(*GIVEN, *overrides)
        Job(resolved(*given, f"output_dir={folders[name] / 'alone'}")).fit("")
        split = SPLIT.get(name, "strategy.tensor_parallel=2")
        configs.append(resolved(*given, f"output_dir={folders[name] / 'split'}", split))
    file = tmp_path_factory.mktemp("configs") / "configs.json"
    file.write_text(json.dumps(configs))
    torchrun(Path(__file__).parent / "runs_on_ranks.py", file)
    torch.set_num_threads(threads)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_what_one_trains(name, runs):
    one, two = (state(runs[name] / way)["actors"]
                for way in ("alone", "split"))  # fmt: skip
    assert one.keys() == two.keys()
    for actor, expected in one.items():
        found = two[actor]["network"]
        assert found.keys() == expected["network"].keys()
        for weight, tensor in expected["network"].items():
            torch.testing.assert_close(found[weight], tensor, rtol=1e-4, atol=1e-5)
    exported, alone = (
        AutoModelForCausalLM.from_pretrained(runs[name] / way / "checkpoints/latest/actor").state_dict()
        for way in ("split", "alone")
    )
    for weight, tensor in exported.items():
        torch.testing.assert_close(tensor, alone[weight], rtol=1e-4, atol=1e-5)
        if name != "adapters":  # merged into weights that the state does not hold
            torch.testing.assert_close(tensor, two["actor"]["network"][f"model.{weight}"], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("actor.optimizer.name=muon",), "actor.optimizer.name=muon: it needs whole matrices, and strategy.tensor_par"),
        (
            ("actor/lora=lora", "actor.lora.quantize=nf4"),
            "actor.lora.quantize: packed weights cannot be split over the ranks of strategy.tensor_parallel=2; set",
        ),
    ],
)
def test_what_trains_other_weights_is_refused(overrides, complaint, resolved):
    with pytest.raises(ValueError, match=complaint):
        Job(resolved("strategy.tensor_parallel=2", *overrides))
