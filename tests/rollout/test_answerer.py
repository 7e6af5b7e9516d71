"""The rewards of an answer know whether its prompt opened a thought: in one turn, in a forced stop, in episodes."""

import pytest

from rft.batch.columns import fields
from rft.batch.row_fields import EPISODE_FIELD
from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.distributed import SINGLE_PROCESS
from rft.metrics import Metrics
from rft.rollout.answerer import Answerer, RowRequests, SingleTurn
from rft.rollout.engine.base import Completion
from rft.rollout.forced_stop import ForcedStop
from rft.rollout.source.rollout import RolloutSource
from tests.reward.reward_of import reward_of
from tests.rollout.contexts import rollout_context
from tests.rollout.environment.play import environments
from tests.rollout.environment.scripted import ALPHABET, SAMPLING, play

ASKED = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
TOOLS = "{%- if tools -%}[{{ tools | map(attribute='function.name') | join(' ') }}] {% endif -%}"
THINKS = ASKED + "{% if add_generation_prompt %}<think>\n{% endif %}"
AFTER_TOOLS = TOOLS + ASKED + "{% if add_generation_prompt and messages[-1].role == 'tool' %}<think>\n{% endif %}"
BEFORE_TOOLS = TOOLS + ASKED + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<think>\n{% endif %}"
SHOP = {"shop": {"_target_": f"{environments.__name__}.Shop"}}
CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
TAGS = {"name": "tags", "weight": 1.0, "tags": ["think"], "outside": "after", "empty": False}
EXACT = {"name": "exact_match", "weight": 1.0, "strip": True}


@pytest.fixture
def template(tmp_path):
    def write(text):
        (tmp_path / "template.jinja").write_text(text)
        return str(tmp_path / "template.jinja")

    return write


class Sampler:
    """The samples of each request say the texts, in their order; a token is a character."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer = tokenizer
        self.texts = texts

    def generate(self, requests, sampling, on_completion=None):
        found = []
        for number, request in enumerate(requests):
            group = [self.say(text, limit) for text, limit in zip(self.texts, request.limits or [99] * 9, strict=False)]
            found.append(group[: len(request.seeds)])
            for sample, completion in enumerate(found[-1]):
                on_completion(number, sample, completion)
        return found

    def say(self, text, limit):
        ids = self.tokenizer(text).input_ids[:limit]
        reason = "length" if len(ids) == limit else "stop"
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(ids, [0.0] * len(ids), reason, text, [0] * len(ids))


@pytest.mark.parametrize(
    ("text", "right", "formed"),
    [(THINKS, [1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]), (ASKED, [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0])],
)
def test_a_source_scores_what_stands_behind_an_open_thought(template, text, right, formed):
    """Right; right in a thought that does not end, if one is open; wrong; and with an opening mark of its own."""
    encoder = Encoder(characters(alphabet=ALPHABET), template(text), None)
    sampler = Sampler(encoder.chat.tokenizer, "so</think>\n4", "4", "4</think>5", "<think>so</think>4")
    reward = reward_of({"exact_match": EXACT, "tags": TAGS}, "exact_match")
    rows = [{"prompt": "2+2=", "answer": "4"}]
    context = rollout_context(SINGLE_PROCESS, sampler, encoder, rows, 1, 4, SAMPLING, 5, scoring=reward.begin)
    batch = RolloutSource(RolloutSource.Options(redraw=None, interruption=None), context).next(Metrics())
    assert batch["terms", "exact_match"].tolist() == right
    assert batch["terms", "tags"].tolist() == formed
    opened = [row.get("prompt_opens") for row in fields(batch)]
    assert opened == (["<think>"] * 4 if text is THINKS else [None] * 4)


def test_a_forced_stop_ends_the_thought(template):
    encoder = Encoder(characters(alphabet=ALPHABET), template(THINKS), None)
    sampler = Sampler(encoder.chat.tokenizer, "4" * 99)
    announced = []
    stop = ForcedStop([0.1, 0.1], "</think>")
    answerer = SingleTurn(encoder, sampler)
    rows = [{"prompt": "2+2="}]
    [[found]] = answerer.answer(RowRequests(rows, [[0]], SAMPLING, stop), lambda *told: announced.append(told[2]))
    assert found.finish.prompt_opens == "<think>" and announced == [found]
    assert found.text.startswith("4" * 20 + "</think>4"), "the prompt of the rest is no prompt of the answer"


@pytest.mark.parametrize(("text", "mark"), [(AFTER_TOOLS, "<think>"), (BEFORE_TOOLS, None)])
def test_the_last_turn_of_an_episode_decides(template, text, mark):
    def write(prompt):
        return "6" if "EUR" in prompt else f"</think>{CALL}"

    [[found]], _ = play(write, SHOP, [{"prompt": "Q"}], template=template(text))
    assert found.text == "6" and found.turns == 2
    assert found.finish.prompt_opens == mark
    assert found.fields.get("prompt_opens") == mark and found.fields[EPISODE_FIELD]["turns"] == 2


def test_a_reward_of_tool_calls_reads_marks_that_are_special_tokens(template):
    tokenizer = characters(alphabet=ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    encoder = Encoder(tokenizer, template(ASKED), None)
    term = {
        "name": "tool_call",
        "weight": 1.0,
        "field": "answer",
        "format": "mistral",
        "ordered": False,
        "score": "all",
    }
    reward = reward_of({"tool_call": term}, "tool_call")
    formats = [term.tool_calls for term in reward.terms.values()]
    right = '[TOOL_CALLS]add[ARGS]{"x": 4}'
    sampler = Sampler(tokenizer, right, right.replace("4", "5"))
    answerer = SingleTurn(encoder, sampler, formats)
    rows = [{"prompt": "2+2=", "answer": [{"name": "add", "arguments": {"x": 4}}]}]
    announced = []
    [found] = answerer.answer(RowRequests(rows, [[0, 1]], SAMPLING), lambda *told: announced.append(told[2]))
    assert [trajectory.finish.text for trajectory in found] == [right, right.replace("4", "5")]
    assert [one.finish for one in announced] == [one.finish for one in found]
    [[plain]] = SingleTurn(encoder, sampler).answer(RowRequests(rows, [[0]], SAMPLING), print)
    assert plain.finish.text == 'add{"x": 4}'


class Played(Answerer):
    """Has two answers to each row: the episode of the second one has failed."""

    def answer(self, asked, announce):
        records = ({"failed": None}, {"failed": "deadline: step did not end"})
        ends = [Segment([1], False)], Finish("stop", "4")
        groups = [[Trajectory(*ends, row, episode=record) for record in records] for row in asked.rows]
        for number, group in enumerate(groups):
            for sample, trajectory in enumerate(group):
                announce(number, sample, trajectory)
        return groups


def test_an_episode_that_failed_has_no_score():
    reward, finished = reward_of({"exact_match": EXACT}, "exact_match"), []
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3=", "answer": "5"}]
    asked = RowRequests(rows, [[0, 1], [2, 3]], SAMPLING)
    groups, scores = Played(None, None).answer_and_score(asked, reward.begin(), Metrics(), finished.append)
    assert [len(group) for group in groups] == [2, 2] and finished == [1, 2, 3, 4]
    assert str(scores.total.tolist()) == "[1.0, nan, 0.0, nan]"
