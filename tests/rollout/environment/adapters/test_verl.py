"""Tools of the real package verl, and tools and interactions that are written to its contract."""

import importlib
import importlib.util
import json

import pytest
import yaml

from rft.rollout.environment.adapters.verl import VerlInteraction, VerlTools
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.scripted import OPTIONS, play

MINE = f"{__name__.rpartition('.')[0]}.verl_tools"
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="the package verl is not installed")
GSM8K = {
    "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
    "config": {"type": "native"},
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "Calculates the reward of gsm8k.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "the answer"}},
                "required": ["answer"],
            },
        },
    },
}
ROW = {"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}}


def own(kind, name, **config):
    """A tool of `verl_tools` without arguments."""
    function = {"name": name, "description": "A tool."}
    schema = {"type": "function", "function": function}
    return {"class_name": f"{MINE}.{kind}", "config": {"type": "native", **config}, "tool_schema": schema}


@pytest.fixture
def node(tmp_path):
    def write(*tools):
        path = tmp_path / f"tools{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump({"tools": list(tools)}))
        return {"verl": {"_target_": f"{VerlTools.__module__}.VerlTools", "tools": str(path)}}

    return write


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(*answers):
    """Answers in their order, each but the last one with calls."""

    def write(prompt):
        left = prompt.count("</tool_call>")
        for answer in answers:
            if left == 0:
                return answer
            left -= answer.count("</tool_call>")
        return "end"

    return write


def dialogues(answers, rows, classes, **options):
    found, sampler = play(script(*answers), rows=[{"prompt": "Go.", **row} for row in rows], classes=classes, **options)
    return [one for [one] in found], sampler


def outputs(trajectory):
    return [one["content"] for one in trajectory.episode["messages"] if one["role"] == "tool"]


@needs_verl
@pytest.mark.parametrize("workers", ["inline", "process"])
def test_a_tool_of_verl_keeps_its_state_for_an_episode(workers, node):
    """Two answers without progress cost 0.05 each, and the last one is right: 1 - 0.05 - 0.05 = 0.9."""
    answers = [call("calc_gsm8k_reward", answer=answer) for answer in ("7", "72", "72")]
    [right, wrong], sampler = dialogues(answers, [ROW, {"tools_kwargs": {}}], node(GSM8K), workers=workers)
    assert right.episode["failed"] is None and wrong.episode["failed"] is None
    assert outputs(right) == [
        "Current parsed answer='7' reward=0.0",
        "Current parsed answer='72' reward=1.0",
        "Current parsed answer='72' reward=1.0",
    ]
    assert right.episode["reward"] == pytest.approx(0.9)
    assert wrong.episode["reward"] == pytest.approx(-0.15), "its row has no answer that could be right"
    assert sampler.batches[0][0].startswith("[calc_gsm8k_reward] ")


@needs_verl
def test_calls_of_one_answer_share_an_instance(node):
    events = importlib.import_module(MINE).EVENTS
    events.clear()
    row = {"tools_kwargs": {"count": {"create_kwargs": {"start": 5}, "execute_kwargs": {"by": 2}}, "other": None}}
    [found], _ = dialogues(
        [call("count") * 2], [row], node(own("Counter", "count", unit="no."), own("Counter", "other"))
    )
    assert found.episode["failed"] is None and sorted(outputs(found)) == ["no. 7", "no. 9"]
    assert found.episode["reward"] == 0.0, "neither None nor a text is a reward"
    assert events == [("create", 5, {"create_kwargs": {"start": 5}}), ("release", 9)]


@needs_verl
def test_a_tool_that_raises_is_an_error_that_the_model_reads(node):
    row = {"tools_kwargs": {"count": {"create_kwargs": {"start": "x"}}}}
    [found], _ = dialogues([call("count"), call("count", more=1)], [row], node(own("Counter", "count", unit="")))
    first, second = outputs(found)
    assert first.startswith("error: call_tool raised TypeError: ") and "takes no argument more" in second
    assert found.episode["failed"] is None and found.episode["tool_failures"] == 2


@needs_verl
def test_an_episode_with_media_or_selected_tools_has_no_score(node):
    [media, selected], _ = dialogues(
        [call("draw")], [{}, {"extra_info": {"tool_selection": ["draw"]}}], node(own("Draws", "draw", unit=""))
    )
    assert outputs(media) == [
        "error: call_tool raised ValueError: the tool draw returned media, which dialogues do not have"[:100]
    ]
    assert media.episode["failed"].startswith("RuntimeError: close raised RuntimeError: the tool draw returned media")
    assert "extra_info.tool_selection is not supported" in selected.episode["failed"]


@needs_verl
def test_wrong_tools_are_refused_with_their_place(node, tmp_path):
    (tmp_path / "list.yaml").write_text("tools: {class_name: a}")
    for classes, message in (
        (node(GSM8K, GSM8K), r"two tools have one name \(calc_gsm8k_reward, calc_gsm8k_reward\)"),
        (node(GSM8K | {"config": {"type": "mcp"}}), r"tools\[0\]\.config\.type=mcp: only native .*environment=mcp"),
        (
            node(GSM8K, own("ReadsLoop", "read")),
            r"tools\[1\]: .*ReadsLoop\.execute takes agent_data, .*; keep the state",
        ),
        (node(own("Broken", "a")), r"tools\[0\]\.class_name=.*Broken.*KeyError: 'url'"),
        (node(own("Countr", "a")), r"has no class 'Countr'; did you mean Counter\?"),
        (node(own("Counter", "a") | {"tool_schema": {"type": "function"}}), r"tools\[0\]\.tool_schema: .*function"),
        (node(), r"expected `tools:` with a list of \{class_name: module\.Class, config: \.\.\.\}"),
        (node(GSM8K) | {}, None),
    ):
        options = EnvironmentOptions(classes=classes, **OPTIONS)
        if message is None:
            assert Environments.of(options).classes["verl"].tools.keys() == {"calc_gsm8k_reward"}
            continue
        with pytest.raises(ValueError, match=rf"^environment\.classes\.verl: .*{message}"):
            _ = Environments.of(options).classes["verl"].tools
    for name, message in (("list", "expected `tools:`"), ("none", r"cannot be read \(.*none\.yaml")):
        with pytest.raises(ValueError, match=message):
            VerlTools(tools=str(tmp_path / f"{name}.yaml"))


def test_without_the_package_the_tools_say_what_to_install(node):
    if importlib.util.find_spec("verl") is not None:
        pytest.skip("the package verl is installed")
    with pytest.raises(ValueError, match=r"the package verl cannot be imported \(.*\); install it: pip install verl"):
        VerlTools(tools=node(GSM8K)["verl"]["tools"])


class TutorInteraction:
    """To verl's contract: a turn has 0.5 for each call of `generate_response`, and the answer of the row ends it."""

    events: list = []  # noqa: RUF012  # of all objects

    def __init__(self, config):
        self.config = config
        self._turns = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._turns[instance_id] = 0
        self.events.append(("start", ground_truth, kwargs))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self._turns[instance_id] += 1
        right = messages[-1] == {"role": "assistant", "content": kwargs["ground_truth"]}
        response = f"{self.config['name']}: {len(messages)} messages"
        return right, response, 0.5 * self._turns[instance_id] if right else None, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.events.append(("end", self._turns.pop(instance_id)))


class Quiet(TutorInteraction):
    """Has the `finalize_interaction` of verl's base class."""

    async def finalize_interaction(self):
        self.events.append(("end",))


@pytest.fixture
def interaction(tmp_path):
    def write(*entries):
        path = tmp_path / f"interactions{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump({"interaction": list(entries)}))
        return {"verl": {"_target_": f"{VerlInteraction.__module__}.VerlInteraction", "interactions": str(path)}}

    return write


def entry(kind="TutorInteraction", **more):
    return {"class_name": f"{__name__}.{kind}", "config": {}, **more}


def conversation(classes, row, *answers):
    turns = iter(answers)
    [[found]], _ = play(lambda prompt: next(turns), classes, [{"prompt": "6*12?", **row}])
    return found.episode


def test_an_interaction_answers_until_it_ends(interaction):
    """The first turn has no score, and the second one 0.5 * 2."""
    TutorInteraction.events.clear()
    row = {"extra_info": {"interaction_kwargs": {"name": "tutor", "ground_truth": "72", "more": 1}}}
    found = conversation(interaction(entry()), row, "71", "72")
    assert found["failed"] is None and found["reward"] == 1.0 and found["turns"] == 2
    assert [message["content"] for message in found["messages"]] == ["6*12?", "71", "tutor: 2 messages", "72"]
    assert TutorInteraction.events == [("start", "72", {"name": "tutor", "more": 1}), ("end", 2)]


def test_a_row_names_its_interaction(interaction):
    TutorInteraction.events.clear()
    two = interaction(entry("Quiet"), entry(name="other"))
    found = conversation(two, {"interaction_kwargs": {"name": "quiet", "ground_truth": "1"}}, "1")
    assert found["failed"] is None and TutorInteraction.events[1:] == [("end",)]
    for kwargs, message in (
        ({}, "interaction_kwargs.name is None, none of the interactions, which are quiet, other"),
        ({"name": "othr"}, "which are quiet, other; did you mean other?"),
    ):
        assert message in conversation(two, {"interaction_kwargs": kwargs}, "1")["failed"]
    assert conversation(interaction(entry()), {"interaction_kwargs": {"ground_truth": "1"}}, "1")["failed"] is None


def test_wrong_interactions(interaction):
    for classes, message in (
        (interaction(entry(), entry()), r"two interactions have the name 'tutor'"),
        (interaction(entry("Tutor")), r"interaction\[0\]\.class_name=.*has no class 'Tutor'"),
        (interaction({"name": "a"}), r"expected `interaction:` with a list of"),
    ):
        with pytest.raises(ValueError, match=message):
            VerlInteraction(interactions=classes["verl"]["interactions"])


@needs_verl
def test_an_interaction_of_verl(interaction):
    classes = interaction({"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}})
    row = {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "72"}}}
    found = conversation(classes, row, "#### 71", "#### 72")
    assert found["failed"] is None and found["reward"] == 1.0
    assert found["messages"][2]["content"].startswith("Your response is incorrect!")
