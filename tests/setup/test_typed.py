"""Values that somebody typed: which keys they are, and that a run refuses those that it does not read."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from rft.errors import Problems
from rft.setup.components import Components
from rft.setup.typed import override_keys, typed_keys, typed_overrides
from tests.helpers import CONFIG

SFT = "algorithm.source samples no texts"
NO_ROLE = "this run does not read it (the algorithm reads no {}, so there is no such model); take it out"
REFUSED = {  # overrides, the key that is refused, and the reason
    "reference.path=/nowhere": ([], "the algorithm reads no ref_logprobs"),
    "reference.micro_batch_tokens=7": ([], "the algorithm reads no ref_logprobs"),
    "critic.optimizer.lr=1e-3": ([], "the algorithm reads no values"),
    "prm.path=a/b": ([], "the algorithm reads no prm_logprobs"),
    "teacher.top_k=8": (["algorithm=on_policy_distill"], "the algorithm reads no teacher_top_ids"),
    "teacher.path=a/b": ([], "the algorithm reads no teacher_logprobs"),
    "algorithm/advantage=rloo": (["algorithm/loss=nll"], "the loss 'nll' reads no advantages"),
    "algorithm/shaping=[overlong]": (["algorithm/loss=nll"], "the loss 'nll' reads no advantages"),
    "algorithm.advantage_clip=1": (["algorithm/loss=nll"], "the loss 'nll' reads no advantages"),
    "algorithm.old_logprobs=rollout": (["algorithm/loss=nll"], "the loss 'nll' reads no old_logprobs"),
    "reward.terms.exact_match.weight=2": (["algorithm/loss=nll"], "nothing trains by the scores"),
    "reward.offload=disk": ([], "no term of the reward computes with a model of this process"),
    "reward.prompt_opens=true": (
        ["reward/terms=[repetition]", "reward.accuracy=repetition"],
        "no term of the reward reads",
    ),
    "reward.include_prefill=true": (["environment=guessing", "reward=environment"], "in an episode"),
    "+reward.terms.exact_match.include_prefill=true": (["environment=calculator", "data=products"], "in an episode"),
    "reward.shard=true": ([], "no term of the reward computes with a model of this process"),
    "data.train_on=last": (["warmup=none"], "all texts that train are sampled"),
    "data.train.slips=0.5": (["warmup=none"], "nothing reads the field 'demonstration'"),
    "data.eval.heldout.slips=0.5": ([], "nothing reads the field 'demonstration'"),
    "actor.optimizer.final_lr=0.1": ([], "actor.optimizer.schedule=constant"),
    "eval.temperature=0.5": ([], "eval.samples=0"),
    "eval.top_p=0.9": ([], "eval.samples=0"),
    "algorithm.group_size=4": (["algorithm=sft"], SFT),
    "rollout.temperature=0.7": (["algorithm=sft"], SFT),
    "rollout.top_p=0.7": (["algorithm=dpo", "warmup=none"], SFT),
    "rollout.min_p=0.1": (["algorithm=sft"], SFT),
    "rollout/first_token=high_temperature": (["algorithm=sft"], SFT),
    "algorithm.mask_truncated=true": (["algorithm=sft"], SFT),
    "reward.terms.exact_match.strip=false": (["algorithm=reward_model"], "the policy scores texts and answers none"),
    "rollout.max_new_tokens=5": (["algorithm=reward_model"], "the policy scores texts and answers none"),
    "eval.samples=4": (["algorithm=reward_model"], "the policy scores texts and answers none"),
    "+rollout.engine_args.max_model_len=64": (
        ["rollout=vllm_server", "rollout.engine.servers.count=0", "rollout.engine.servers.addresses=[a:1]"],
        "rollout.engine.servers.count=0",
    ),
    "rollout.engine.servers.python=/bin/x": (
        ["rollout=vllm_server", "rollout.engine.servers.count=0", "rollout.engine.servers.addresses=[a:1]"],
        "rollout.engine.servers.count=0",
    ),
    "data.max_response_tokens=8": (["rollout.max_new_tokens=4"], "rollout.max_new_tokens=4 takes its place"),
    "reward.call.sandbox.limits.files=99": (["reward.call.workers=process"], "no term has call.workers=sandbox"),
    "serve.port=9000": ([], "mode=train does not read it"),
    "serve.count=2": (["mode=serve"], "HFEngine has no servers, so reward terms are served"),
    "serve.checkpoint=null": (["mode=serve"], "so reward terms are served"),
    "serve.limits.rows=8": (
        ["mode=serve", "rollout=vllm_server"],
        "a model is served; rollout=hf serves reward terms",
    ),
    "rollout.engine.servers.token=MY_KEY": (["rollout=vllm_server"], "rollout.engine.servers.addresses=[]"),
}
READ = [  # the same keys in runs that read them
    ["algorithm/terms=[kl]", "reference.micro_batch_tokens=7"],
    ["algorithm=ppo", "critic.optimizer.lr=1e-3"],
    ["actor.optimizer.schedule=linear", "actor.optimizer.final_lr=0.1"],
    ["eval.samples=4", "eval.temperature=0.5"],
    ["rollout.temperature=0.7", "rollout.top_p=0.9", "algorithm.group_size=4", "data.train_on=last"],
    ["algorithm=sft", "data.train_on=last", "rollout.max_new_tokens=5"],
    ["data.max_response_tokens=8"],
    ["mode=serve", "serve.port=9000", "serve.token=MY_KEY", "serve.limits.rows=8"],
    ["mode=serve", "rollout=vllm_server", "serve.token=MY_KEY", "serve.count=2", "serve.checkpoint=null"],
    ["mode=generate", "algorithm=sft", "rollout.temperature=0.7"],
    ["reward.call.workers=sandbox", "reward.call.deadline_s=5", "reward.call.sandbox.limits.files=99"],
    ["algorithm=raft", "reward.terms.exact_match.weight=2"],
]


@pytest.fixture
def typed(monkeypatch):
    """The config that the command line composes with these overrides, while Hydra says that they were typed."""

    def compose_typed(overrides, folder=CONFIG, name="main"):
        extra = [] if folder == CONFIG else [f"hydra.searchpath=[file://{CONFIG}]"]
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(name, [*overrides, *extra], return_hydra_config=True)
        monkeypatch.setattr(HydraConfig, "instance", classmethod(lambda cls, *_: held))
        held = HydraConfig.__new__(HydraConfig)
        held.cfg = OmegaConf.create({"hydra": config.hydra})
        del config.hydra
        return OmegaConf.to_container(config, resolve=True)

    return compose_typed


@pytest.mark.parametrize("value", ["abc==", "x'y", "f(1)", "[1,", "a,b"])
def test_the_value_of_a_variable_is_no_override(typed, value, monkeypatch):
    monkeypatch.setenv("RFT_T_SECRET", value)
    overrides = ["+reward.note=${oc.env:RFT_T_SECRET}", "seed=3"]
    assert typed(overrides)["reward"]["note"] == value
    assert typed_overrides()[:2] == overrides
    assert {"reward.note", "seed"} <= typed_keys().keys()


@pytest.mark.parametrize("override", REFUSED)
def test_a_typed_value_that_the_run_does_not_read_is_refused(typed, override):
    others, reason = REFUSED[override]
    with pytest.raises(Problems) as raised:
        Components(typed([*others, override]))
    key = override.lstrip("+").split("=")[0].replace("/", ".")
    [message] = raised.value.messages
    assert message.startswith(f"{key}: ") and reason in message and "take it out" in message


@pytest.mark.parametrize("overrides", READ, ids=" ".join)
def test_a_typed_value_that_the_run_reads_is_accepted(typed, overrides):
    Components(typed(overrides))


def test_what_nobody_typed_is_accepted(resolved):
    assert typed_keys() == {}
    Components(resolved("reference.path=/nowhere"))


def test_keys_of_overrides():
    assert override_keys(["a.b=1", "+c.d=x", "~e", "algorithm/loss=nll", "g@h.i=j"]) == [
        "a.b",
        "c.d",
        "algorithm.loss",
        "h.i",
    ]
    assert override_keys(["eval={samples: 2, temperature: 0.5}"]) == ["eval.samples", "eval.temperature"]
    assert override_keys(["data.eval.x={_target_: a.B, slips: 1}", "data.eval.x.seed=1", "seed=1"]) == ["seed"]
