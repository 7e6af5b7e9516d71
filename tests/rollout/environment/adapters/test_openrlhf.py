"""Environments to OpenRLHF's contract; those of the real package where it is installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rft.rollout.environment.adapters.openrlhf import OpenRlhf
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.scripted import OPTIONS, play

# As examples/python/agent_func.py of OpenRLHF, with a reward that is known.
HEAD = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
BASE = AgentInstanceBase
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
FILE = """
import torch

SEEN = []


class AgentInstance(BASE):
    {init} __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        SEEN.append(states)
        return {{"observation": states["observation"] + {added!r}}}

    async def step(self, states: dict, **kwargs):
        SEEN.append(states)
        done = states["action_text"] == states["label"]
        self.step_idx += 1
        reward = torch.tensor([1.0]) if done else torch.tensor(-0.25)
        feedback = "\\n\\nHuman: [CORRECT]\\n</s>" if done else {feedback!r}
        return {{"rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done,
                "sampling_params": states.get("sampling_params", None), "extra_logs": {{"steps": self.step_idx}},
                **{more!r}}}
"""
MARKERS = ["<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "\n\nHuman: ", "\n\nAssistant: ", "\n</s>"]
REAL = importlib.util.find_spec("openrlhf") is not None


@pytest.fixture
def node(tmp_path):
    """Writes a file, and returns the node of its environment."""

    def write(
        head="BASE = object\n",
        init="def",
        added="",
        feedback="\n\nHuman: no\n</s>\n\nAssistant: ",
        more=None,
        **options,
    ):
        path = tmp_path / f"agent{len(list(tmp_path.iterdir()))}.py"
        path.write_text(head + FILE.format(init=init, added=added, feedback=feedback, more=more or {}))
        target = f"{OpenRlhf.__module__}.OpenRlhf"
        options = {"name": "AgentInstance", "label": "answer", "markers": MARKERS, **options}
        return {"openrlhf": {"_target_": target, "path": str(path), **options}}

    return write


def episode(classes, prompt="2+2=", answers=("3", "4"), **options):
    """The episode of one row whose answer is 4, and the prompts of its turns."""
    turns = iter(answers)
    [[found]], sampler = play(lambda prompt: next(turns), classes, [{"prompt": prompt, "answer": "4"}], **options)
    return found.episode, [text for [text] in sampler.batches]


@pytest.mark.parametrize(
    ("head", "init", "workers"),
    [
        ("BASE = object\n", "def", "inline"),
        pytest.param("BASE = object\n", "async def", "process", marks=pytest.mark.slow),
        pytest.param(HEAD, "async def", "inline", marks=pytest.mark.skipif(not REAL, reason="no package")),
    ],
)
def test_an_agent_instance_plays(head, init, workers, node):
    """A wrong answer costs 0.25, the right one has 1: 0.75."""
    found, prompts = episode(node(head, init), workers=workers)
    assert found["failed"] is None and found["reward"] == 0.75 and found["turns"] == 2
    assert [message["content"] for message in found["messages"]] == ["2+2=", "3", "no", "4"]
    assert prompts[1].endswith("no") and "Human" not in prompts[1]


def test_states_are_those_of_openrlhf(node):
    classes = node(added=" Think.")
    found, _ = episode(classes, prompt=[{"role": "system", "content": "Count."}, {"role": "user", "content": "2+2="}])
    loaded = [vars(module) for module in list(sys.modules.values())]
    [seen] = [names["SEEN"] for names in loaded if names.get("__file__") == classes["openrlhf"]["path"]]
    first = "Count.\n\n2+2= Think."
    assert seen == [
        {"observation": "Count.\n\n2+2=", "label": "4"},
        {"observation_text": first, "action_text": "3", "label": "4", "sampling_params": None},
        {
            "observation_text": f"{first}3\n\nHuman: no\n</s>\n\nAssistant: ",
            "action_text": "4",
            "label": "4",
            "sampling_params": None,
        },
    ]
    assert [message["content"] for message in found["messages"][:2]] == ["Count.", "2+2= Think."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feedback": "<|im_end|>\n<|im_start|>tool\nno"}, "has the marker '<|im_start|>' of a chat template"),
        ({"feedback": "<end_of_turn>"}, "has the marker '<end_of_turn>'"),
        ({"more": {"sampling_params": {"max_tokens": 3}}}, "step returned sampling_params, which is not supported"),
        ({"more": {"environment_images": ["a"]}}, "step returned environment_images, which is not supported"),
        ({"more": {"rewards": "nan"}}, "the reward is nan, not a finite number"),
    ],
)
def test_what_is_not_supported_ends_the_episode_by_its_name(options, message, node):
    found, _ = episode(node(**options))
    assert message in found["failed"]


def test_another_prompt_is_refused(node):
    classes = node()
    path = Path(classes["openrlhf"]["path"])
    path.write_text(path.read_text().replace("states[\"observation\"] + ''", '"Guess a number."'))
    found, _ = episode(classes)
    assert "reset returned the observation 'Guess a number.', which does not begin with the prompt" in found["failed"]


def test_wrong_files(node, tmp_path):
    missing = "import openrlhf_nowhere\nBASE = object\n"
    loop = "BASE = object\nclass AgentExecutor:\n    async def execute(self, prompt, label, sampling_params): ...\n"
    for classes, message in (
        (node(path="nowhere.py"), r"path=nowhere\.py: name the Python file of --agent_func_path"),
        (
            node(missing),
            r"agent\d\.py cannot be imported \(ModuleNotFoundError: .*openrlhf_nowhere.*pip install openrlhf",
        ),
        (node(name="AgentInstanc"), r"has no class 'AgentInstanc'; did you mean AgentInstance\?"),
        (node(loop), r"AgentExecutor\.execute is a loop of its own, .*environment=agent"),
    ):
        environments = Environments.of(EnvironmentOptions(classes=classes, **OPTIONS))
        with pytest.raises(ValueError, match=message):
            environments.classes["openrlhf"].target.build()
