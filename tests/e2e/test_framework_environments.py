"""Whole runs with environments of other frameworks, and rows that ask for them."""

import json

import pytest
import yaml

from rft.setup.assembly import Job
from tests.helpers import numbers

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("strategy.device=cpu", "cache=null", "steps=2", "eval.every=2", "trajectories.every=1", "batch.prompts=4",
         "algorithm.group_size=4", "rollout.max_new_tokens=6", "data.template=turns")  # fmt: skip
AGENT = """
class AgentInstance:
    async def reset(self, states, **kwargs):
        return states

    async def step(self, states, **kwargs):
        done = states["action_text"] == "x" + states["label"]
        feedback = "<|im_end|>\\n<|im_start|>user\\nno<|im_end|>\\n<|im_start|>assistant\\n"
        return {"rewards": float(done), "environment_feedback": feedback, "done": done}
"""
WARM = ("warmup.steps=30", "warmup.rows=8", "warmup.eval_every=0", "warmup.source.response=response")


@pytest.fixture
def job(resolved, tmp_path):
    """A job on rows of files, whose first prompt is held out."""

    def make(rows, *overrides):
        for name, part in (("train", rows[1:]), ("heldout", rows[:1])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        files = (f"data.train.path={tmp_path}/train.jsonl", f"data.eval.heldout.path={tmp_path}/heldout.jsonl")
        config = resolved(*SMALL, *files, *overrides)
        config["output_dir"] = str(tmp_path / "run")
        return Job(config)

    return make


@pytest.fixture
def fit(job, tmp_path):
    """Two steps; returns the numbers of the last one, and the episodes of all."""

    def run(rows, *overrides):
        job(rows, *WARM, "environment.max_turns=3", "reward=environment", *overrides).fit("")
        files = sorted((tmp_path / "run" / "trajectories").iterdir())
        rows = [json.loads(line) for file in files for line in file.open()]
        return numbers(tmp_path / "run")[-1], [row["episode"] for row in rows]

    return run


def verl_rows(extra):
    """Prompts of one digit; the model imitates the response. `extra` gives the extra_info of a digit."""
    return [
        {
            "prompt": [{"role": "user", "content": digit}],
            "reward_model": {"ground_truth": digit},
            "response": f"x{digit}",
            "extra_info": extra(digit),
        }
        for digit in "0123456789"
    ]


def tool_arguments(digit):
    return {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": digit}}}}


def test_tools_of_verl_train(fit, tmp_path):
    pytest.importorskip("verl")
    from tests.rollout.environment.adapters.test_verl import GSM8K

    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [GSM8K]}))
    last, episodes = fit(
        verl_rows(tool_arguments),
        "data=verl",
        "environment=verl",
        f"environment.classes.verl.tools={tmp_path}/tools.yaml",
        "environment.tool_format={name: mark, marks: {x: calc_gsm8k_reward}}",
        'actor.tokenizer.alphabet="0123456789x.-\'= Curentpasdw"',
    )
    assert last["episode/tool_calls"] > 0 == last["episode/failed"] and last["grad_norm"] > 0
    right = next(one for one in episodes if any("reward=1.0" in message["content"] for message in one["messages"]))
    assert right["reward"] > 0.5, "one for the right answer, less 0.05 for calls without progress"


def test_an_environment_of_openrlhf_trains(fit, tmp_path):
    (tmp_path / "agent_func.py").write_text(AGENT)
    last, episodes = fit(
        [{"input": digit, "output": f"x{digit}", "label": digit} for digit in "0123456789"],
        "data=openrlhf",
        "environment=openrlhf",
        f"environment.classes.openrlhf.path={tmp_path}/agent_func.py",
        "environment.classes.openrlhf.label=label",
        'actor.tokenizer.alphabet="0123456789xno"',
    )
    assert last["episode/turns"] > 1 and last["episode/failed"] == 0 and last["grad_norm"] > 0
    right = next(one for one in episodes if one["reward"] > 0)
    assert right["messages"][-1]["content"] == f"x{right['messages'][0]['content']}"
    wrong = next(one for one in episodes if one["turns"] == 3)
    assert [message["content"] for message in wrong["messages"][2:5:2]] == ["no", "no"]


class DigitInteraction:
    """To verl's contract: ends once the answer is an x and the digit of the row."""

    def __init__(self, config):
        pass

    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id

    async def generate_response(self, instance_id, messages, *, ground_truth, **kwargs):
        right = messages[-1]["content"] == f"x{ground_truth}"
        return right, "no", float(right), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        pass


@pytest.mark.slow
def test_an_interaction_of_verl_trains(fit, tmp_path):
    entries = [{"class_name": f"{__name__}.DigitInteraction", "config": {}}]
    (tmp_path / "interactions.yaml").write_text(yaml.safe_dump({"interaction": entries}))
    last, episodes = fit(
        verl_rows(lambda digit: {"interaction_kwargs": {"name": "digit", "ground_truth": digit}}),
        "data=verl",
        "environment=verl_interaction",
        f"environment.classes.verl.interactions={tmp_path}/interactions.yaml",
        'actor.tokenizer.alphabet="0123456789xno"',
    )
    assert last["episode/turns"] > 1 and last["episode/failed"] == 0 and last["grad_norm"] > 0
    assert {one["reward"] for one in episodes} == {0.0, 1.0}


def test_rows_for_tools_need_an_environment(job):
    made = job(verl_rows(tool_arguments), "data=verl", "warmup=none")
    with pytest.raises(ValueError) as found:
        made.load(1)
        made.check.end()
    for name in ("train", "heldout"):
        assert f"{name}.jsonl line 1: the field 'tools_kwargs' asks for tools" in str(found.value)
