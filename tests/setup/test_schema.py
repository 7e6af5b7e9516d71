"""Every yaml composes into a config that is accepted, and no key can be misspelt."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

import rft
from rft.algorithm import LOSSES
from rft.main import explain, known_keys
from rft.setup.assembly import Job
from tests.conftest import WITHOUT_WARMUP

CONFIG = Path(rft.__file__).parent / "config"
# What a group's option needs beside it before it makes sense.
COMPANIONS = {
    "actor/hf": ["actor.path=some/model"],
    "actor/processor/pretrained": ["actor.processor.path=some/model"],
    "actor/tokenizer/pretrained": ["actor.tokenizer.path=some/model"],
    "algorithm/advantage/gae": ["algorithm/critic_loss=value"],
    "algorithm/advantage/gae_length_adaptive": ["algorithm/critic_loss=value"],
    "algorithm/advantage/none": ["algorithm=sft"],
    "algorithm/advantage/prime": ["algorithm/prm_loss=implicit_reward"],
    "algorithm/advantage/spo": ["algorithm=spo"],
    "algorithm/aggregation/none": ["algorithm=gmpo"],
    "algorithm/critic_loss/value": ["algorithm=ppo"],
    "algorithm/loss/gmpo": ["algorithm=gmpo"],
    "algorithm/loss/bradley_terry": ["algorithm=reward_model"],
    "algorithm/loss/step_cross_entropy": ["algorithm=process_reward_model"],
    "algorithm/loss/gvpo": ["algorithm=gvpo"],
    "algorithm/loss/sppo": ["algorithm=sppo"],
    **{
        f"algorithm/loss/{name}": [f"algorithm={name}"]
        for name in ("dpo", "cdpo", "robust_dpo", "ipo", "hinge", "simpo", "orpo", "cpo", "kto")
    },
    "algorithm/prm_loss/implicit_reward": ["algorithm=prime"],
    "algorithm/source/conversation": ["algorithm=sft"],
    "algorithm/source/dataset": ["algorithm=sft"],
    "algorithm/source/text": ["algorithm=sft"],
    "algorithm/source/labelled": ["algorithm=kto"],
    "algorithm/source/pairs": ["algorithm=dpo"],
    "algorithm/source/mixed": ["algorithm=gkd"],
    "algorithm/source/self_play": ["algorithm=spin"],
    "algorithm/source/steps": ["algorithm=process_reward_model"],
    "algorithm/terms/chosen_nll": ["algorithm=dpo"],
    "algorithm/terms/score_centering": ["algorithm=reward_model"],
    "data/hub": ["data.path=org/name"],
    "data/gsm8k": ["metric=eval/test/accuracy"],
    "data/benchmarks": ["metric=eval/math_500/accuracy"],
    "data/questions": ["data.eval.questions.path=questions.jsonl", "metric=eval/questions/accuracy"],
    **{
        f"data/{format}": ["data.train.path=rows.jsonl", "data.eval.heldout.path=rows.jsonl"]
        for format in ("openrlhf", "sharegpt", "trl", "verl")
    },
    "data/reasoning_gym": ["data.train.tasks={gcd: {}}"],
    "data/verifiers": ["environment=verifiers", "environment.classes.verifiers.id=sums"],
    "data/verifiers_v1": ["environment=verifiers_v1", "environment.classes.verifiers.env.taskset.id=sums"],
    "data/judge": ["data.train.rows.path=rows.jsonl", "data.eval.heldout.rows.path=rows.jsonl"],
    **{
        f"data/question/{question}": ["data=judge_add"]
        for question in ("good", "better", "reasoned", "short_good", "short_better")
    },
    "reward/function": ["reward.terms.function.function=tests.reward.user_functions:ours"],
    "reward/terms/function": [
        "reward.accuracy=function",
        "reward.terms.function.function=tests.reward.user_functions:ours",
    ],
    "reward/terms/choice": ["reward.accuracy=choice"],
    "reward/terms/ifeval": ["reward.accuracy=ifeval"],
    "reward/terms/language": ["reward.accuracy=language"],
    "reward/terms/reasoning_gym": ["reward.accuracy=reasoning_gym"],
    "reward/terms/math": ["reward.accuracy=math"],
    "reward/terms/code": ["reward.accuracy=code"],
    "reward/terms/gsm8k": ["reward.accuracy=gsm8k"],
    "reward/terms/judge": ["reward.accuracy=judge", "reward.terms.judge.path=some/model"],
    "reward/terms/judge_text": ["reward.accuracy=judge_text", "reward.terms.judge_text.path=some/model"],
    "reward/terms/code_server": ["reward.accuracy=code_server", "reward.terms.code_server.address=http://here:8080"],
    "reward/terms/judge_server": [
        "reward.accuracy=judge_server",
        *("reward.terms.judge_server.addresses=[http://here:8000/v1]", "reward.terms.judge_server.model=some"),
    ],
    "reward/terms/remote": ["reward.accuracy=remote", "reward.terms.remote.addresses=[http://here:8000]"],
    "reward/terms/verdict": ["reward.accuracy=verdict"],
    "reward/terms/model": ["reward.accuracy=model", "reward.terms.model.path=some/model"],
    "reward/terms/process_model": ["reward.accuracy=process_model", "reward.terms.process_model.path=some/model"],
    **{
        f"reward/terms/{term}": [f"reward.accuracy={term}"]
        for term in ("format", "json", "overlap", "repetition", "script", "tag_count", "tags", "tool_call")
    },
    "environment/agent": ["environment.classes.agent._target_=tests.rollout.environment.gateway.agents.one_turn"],
    "environment/search": ["environment.classes.search.corpus=some.jsonl"],
    "environment/verifiers": ["environment.classes.verifiers.id=sums"],
    "environment/verifiers_v1": ["environment.classes.verifiers.env.taskset.id=sums"],
    "environment/openenv": [
        *("environment.classes.openenv.url=http://here:8000", "environment.classes.openenv.action=text"),
        "environment.classes.openenv.observation=shown",
    ],
    "environment/verl": ["environment.classes.verl.tools=some.yaml"],
    "environment/verl_interaction": ["environment.classes.verl.interactions=some.yaml"],
    "environment/openrlhf": ["environment.classes.openrlhf.path=some.py"],
    "environment/mcp": ["environment.classes.mcp.servers={search: {command: some}}"],
    "reward/environment": ["environment=guessing"],
    "algorithm/advantage/gigpo": ["environment=guessing"],
    "algorithm/advantage/hgpo": ["environment=guessing"],
    "algorithm/advantage/rae": ["environment=guessing"],
    "algorithm/terms/echo": ["environment=guessing"],
    "reward/terms/environment": ["environment=guessing", "reward.accuracy=environment"],
    "reward/terms/tool_call_valid": ["reward.accuracy=tool_call_valid"],
    "rollout/none": ["algorithm=reward_model"],
}


def option(path: Path) -> str:
    return str(path.relative_to(CONFIG).with_suffix(""))


ALGORITHMS = sorted(path.stem for path in CONFIG.glob("algorithm/[!_]*.yaml"))
# What other options build on begins with an underscore; the options of modes are in every config.
OPTIONS = sorted(option(path) for path in CONFIG.rglob("*/[!_]*.yaml") if path.parent.name not in ("modes", "rows"))


def selection(name: str) -> list[str]:
    group, _, chosen = name.rpartition("/")
    if group == "actor/head":  # of the algorithms that train another one than a language head
        return ["algorithm=reward_model" if chosen == "score" else "algorithm=process_reward_model"]
    return [f"{group}={chosen}", *COMPANIONS.get(name, [])]


@pytest.fixture
def extras_installed(monkeypatch):
    loggers = {"mlflow", "swanlab", "tensorboard", "trackio", "wandb"}
    rows = {"reasoning_gym", "verifiers"}
    find, optional = importlib.util.find_spec, loggers | rows | {"vllm", "sglang", "peft", "bitsandbytes"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *given: name if name in optional else find(name, *given)
    )


# Slow: the parts of algorithms, which plain tests compose where an algorithm has them.
PART = re.compile(r"algorithm/\w+/")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if PART.match(name) else []) for name in OPTIONS]
)
def test_every_option_composes_and_is_accepted(name, resolved, extras_installed):
    Job(resolved(*selection(name)))


CORRECTIONS = sorted(path.stem for path in CONFIG.glob("algorithm/correction/*.yaml") if path.stem != "none")


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_takes_the_rollout_policy_as_its_anchor(name, resolved):
    """With a loss without a ratio, which would count twice."""
    anchor = "algorithm.correction.anchor=rollout"
    job = Job(resolved(f"algorithm/correction={name}", anchor, "algorithm/loss=reinforce"))
    assert job.algorithm.correction.anchor == "rollout"


@pytest.mark.parametrize("kind", ["file", "hub"])
def test_rows_of_a_data_set_are_a_group_of_their_own(kind, resolved):
    rows = (f"data/rows@data.train={kind}", f"data/rows@data.eval.heldout={kind}")
    job = Job(resolved("data=trl", *rows, "data.train.path=a.jsonl", "data.eval.heldout.path=b.jsonl"))
    assert job.train.options["schema"] == {"name": "messages"} and job.train.options["limit"] is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_numbers_of_an_algorithm_stay_with_it(algorithm, resolved):
    config = resolved(f"algorithm={algorithm}")
    assert config["algorithm"]["name"] == algorithm
    assert config["output_dir"] == f"outputs/{config['data']['name']}-{algorithm}-seed0"
    assert (config["warmup"] is None) == (algorithm in WITHOUT_WARMUP)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_makes_several_updates_a_batch_if_its_loss_reads_a_ratio(algorithm, resolved):
    config = resolved(f"algorithm={algorithm}")
    reads = LOSSES.build(config["algorithm"]["loss"], "algorithm.loss").facts.reads
    ratio = {"old_logprobs", "rollout_logprobs"} & set(reads)
    assert (config["batch"]["minibatches"] > 1) == bool(ratio)


def test_several_loggers_and_terms_at_once(resolved, extras_installed):
    job = Job(
        resolved("logger=[wandb,tensorboard]", "reward/terms=[exact_match,format]", "algorithm/terms=[kl,entropy]")
    )
    assert len(job.sinks) == 2
    assert job.reward.names == ("exact_match", "format")
    assert [term.name for term in job.algorithm.policy.terms] == ["ppo_clip", "kl", "entropy"]


def test_nested_groups_do_not_leak_into_each_other(resolved):
    """The old loss's numbers are gone when another is selected."""
    config = resolved("algorithm=gspo", "algorithm/loss=nll", "algorithm/advantage=rloo")
    assert config["algorithm"]["loss"] == {"name": "nll"}
    assert config["algorithm"]["advantage"] == {"name": "rloo"}


def leaves(node, path=()):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def misspelt(config: dict, path: tuple[str, ...]) -> dict:
    changed = copy.deepcopy(config)
    node = changed
    for key in path[:-1]:
        node = node[key]
    changed_node = {(f"{key}x" if key == path[-1] else key): value for key, value in node.items()}
    node.clear()
    node.update(changed_node)
    return changed


@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "sft", "dapo"))]
)
def test_a_misspelt_key_is_refused_by_name(algorithm, resolved):
    """Every leaf of the resolved config, as a misspelt key in a recipe's body would be merged. Of the others, those of
    the nodes that differ from those of grpo, and of the critic, which grpo does not read."""
    config, first = (resolved(f"algorithm={name}", "algorithm/terms=[kl_adaptive]") for name in (algorithm, "grpo"))
    Job(config)
    accepted = []
    for path in leaves(config):
        if algorithm != "grpo" and config[path[0]] == first[path[0]] and (algorithm, path[0]) != ("ppo", "critic"):
            continue
        try:
            Job(misspelt(config, path))
        except ValueError as error:
            wrong, parent = ".".join((*path[:-1], f"{path[-1]}x")), ".".join(path[:-1])
            # an entry without its name or _target_ is quoted whole behind its own key
            assert str(error).startswith((f"{wrong}:", f"{parent}: expected a")) and path[-1] + "x" in str(error), wrong
        else:
            accepted.append(".".join(path))
    assert accepted == []


def test_a_misspelt_key_on_the_command_line_is_refused_by_name(resolved):
    config = resolved()
    parts = {path[0]: path for path in leaves(config)}  # one leaf of every root key: each is a full composition
    for key in map(".".join, parts.values()):
        with pytest.raises(HydraException) as caught:
            resolved(f"{key}x=1")
        GlobalHydra.instance().clear()
        assert explain(caught.value).startswith(f"{key}x: no such key"), key


def test_the_key_that_was_meant_is_named():
    known = known_keys()
    assert {"seed", "batch.prompts", "actor.optimizer.lr", "algorithm.group_size", "warmup.steps"} <= set(known)
    for key in known[::27]:
        found = explain(HydraException(f"Could not override '{key}x'.\nTo append to your config use +{key}x=1"))
        assert found == f"{key}x: no such key; did you mean {key}?"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "my-machine"])
def test_servers_that_other_machines_reach_need_a_token(host, resolved):
    with pytest.raises(ValueError, match=r"^serve\.host=.*: other machines reach the servers there; set serve\.token="):
        Job(resolved(f"serve.host='{host}'"))
    Job(resolved(f"serve.host='{host}'", "serve.token=MY_KEY"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_servers_on_the_loopback_interface_need_none(host, resolved):
    Job(resolved(f"serve.host='{host}'"))
