"""Answers in a dialogue that are stopped by force: both sampled parts are one turn, and what is inserted trains not."""

import math

import torch

from rft.algorithm.advantage.turns import gigpo
from rft.algorithm.scores.rewards import add_turn_rewards
from rft.batch.collate import collate
from rft.batch.trajectory import to_rows
from rft.batch.turn_columns import TURN_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.report.dialogue import dialogue
from rft.rollout.answerer import RowRequests
from rft.rollout.engine.base import row_seed
from rft.rollout.environment.episodes import EpisodeAnswerer
from rft.rollout.environment.options import EnvironmentOptions, Environments
from rft.rollout.forced_stop import ForcedStop
from tests.helpers import hf_engine
from tests.rollout.environment import scripted
from tests.rollout.environment.gateway.agents import fetch, user
from tests.rollout.environment.play import environments
from tests.rollout.environment.scripted import OPTIONS, play
from tests.rollout.word_models import END, build, sampling, word_tokenizer

HERE = environments.__name__
SHOP = {"shop": {"_target_": f"{HERE}.Shop"}}
GUESS = {"guess": {"_target_": f"{HERE}.Guess"}}
EOS = "<eos>"
CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
TEN = ForcedStop([0.05, 0.05], "</think>")  # 10 of 200 tokens; a character is a token


def texts(trajectory, tokenizer):
    return [tokenizer.decode(segment.tokens) for segment in trajectory.segments]


def thinks_then_calls(text):
    if "EUR" in text:
        return "6"
    return CALL if "</think>" in text else "so many words"


def test_an_answer_is_cut_gets_the_phrase_and_then_calls_a_tool(monkeypatch):
    asked = []
    generate = scripted.ScriptedSampler.generate

    def recorded(self, requests, how, *arguments):
        asked.extend((request.seeds[0], request.limit(0, how)) for request in requests)
        return generate(self, requests, how, *arguments)

    monkeypatch.setattr(scripted.ScriptedSampler, "generate", recorded)
    [[found]], sampler = play(thinks_then_calls, SHOP, [{"prompt": "Q"}], forced_stop=TEN)
    parts = ["[price stock] Q", "so many wo", "</think>", CALL + EOS, "3 EUR=", "6" + EOS]
    assert texts(found, sampler.tokenizer) == parts
    assert [text for [text] in sampler.batches] == [
        parts[0], "".join(parts[:3]), "".join(parts[:5])
    ], "each prompt is all tokens so far, as they were sampled"  # fmt: skip
    assert asked == [(0, 10), (row_seed(0, 0, 1), 200 - 10 - 8), (row_seed(0, 1, 1), 10)]
    assert found.turns == 2 == found.episode["turns"] and found.forced_stops == 1
    assert found.text == "6" and found.finish.reason == "stop" and found.episode["tool_calls"] == 1
    [answer] = [message for message in found.episode["messages"] if "tool_calls" in message]
    assert answer["content"] == "so many wo</think>", "the message has both parts and the phrase"
    assert dialogue(found.episode)[1].count("turn trains") == 2

    [row] = to_rows(found, group=0, unit=0, columns=TURN_COLUMNS)
    long, call = len(parts[0]), len(CALL) + 1
    assert row["turn"].tolist() == [0] * long + [1] * (10 + 8 + call) + [0] * 6 + [2, 2]
    trains = [False] * long + [True] * 10 + [False] * 8 + [True] * call + [False] * 6 + [True] * 2
    assert row["response_mask"].tolist() == trains
    down = [[-float(place) for place in range(size)] for size in (10, call, 2)]
    assert row["rollout_logprobs"].tolist() == [0] * long + down[0] + [0] * 8 + down[1] + [0] * 6 + down[2]
    assert row["version"].tolist() == [3 * flag for flag in trains]
    observed = [place for place, flag in enumerate(row["observation_mask"].tolist()) if flag]
    assert observed == list(range(len(trains) - 8, len(trains) - 2)), "of the tool alone, not the phrase"


def test_the_reward_of_a_turn_counts_once_and_reaches_both_parts():
    five = ForcedStop([0.025, 0.025], "0")  # 5 of 200 tokens

    def guesses(text):
        return "5" if "low" in text else "3" if "000000" in text else "0" * 8

    [group], sampler = play(guesses, GUESS, [{"prompt": "Q", "number": 5}], samples=2, forced_stop=five)
    for found in group:
        assert texts(found, sampler.tokenizer) == ["Q guess:", "00000", "0", "3" + EOS, "low", "5" + EOS]
    rows = [row for unit, one in enumerate(group) for row in to_rows(one, group=0, unit=unit, columns=TURN_COLUMNS)]
    rows[0]["turn_scores"][-1] = 7.0  # so that the two differ
    batch = collate(rows)
    batch["loss_mask"] = batch["response_mask"]
    assert batch["turn"].tolist() == [[0] * 8 + [1] * 8 + [0] * 3 + [2, 2]] * 2
    batch["turn_scores"][:, 15] = torch.tensor([4.0, 2.0])
    scores, rewards = add_turn_rewards(torch.zeros(2), torch.zeros(2, 21), batch, 0.5, 1.0)
    assert scores.tolist() == [4 + 3.5, 2 + 0.5] and rewards.nonzero()[:, 1].tolist() == [15, 20] * 2
    returns = rewards.flip(1).cumsum(1).flip(1)
    assert returns[0, 8:16].tolist() == [7.5] * 8, "the return of the turn at both parts"
    [first, second] = gigpo(scores, rewards, batch, omega=1.0, discount=1.0, scale="none")["advantages"]
    assert first[8:13].tolist() == first[14:16].tolist()[:1] * 5 == [2.5 + 2.5] * 5
    assert second[8:13].tolist() == [-5.0] * 5 and second[14:16].tolist() == [-5.0] * 2


def test_the_reward_of_a_step_stands_at_the_end_of_the_turn():
    four, row = ForcedStop([0.02, 0.02], "00"), {"prompt": "Q", "number": 1000002}
    [[found]], sampler = play(lambda text: "2" if "1000" in text else "10000", GUESS, [row], forced_stop=four)
    assert texts(found, sampler.tokenizer) == ["Q guess:", "1000", "00", "2" + EOS] and found.text == "1000002"
    [row] = to_rows(found, group=0, unit=0, columns=TURN_COLUMNS)
    assert row["turn"].tolist() == [0] * 8 + [1] * 8 and row["turn_scores"].tolist() == [0.0] * 15 + [1.0]
    assert len({*row["anchor"][8:].tolist()}) == 1 and row["anchor"][8] != 0


def test_an_answer_without_room_for_the_phrase_ends_at_its_limit():
    """`max_tokens` leaves 9 tokens, which the phrase with a token before and one behind does not fit into."""
    [[found]], sampler = play(lambda text: "so many words", SHOP, [{"prompt": "Q"}], forced_stop=TEN, max_tokens=9)
    assert texts(found, sampler.tokenizer) == ["[price stock] Q", "so many w"] and found.finish.reason == "length"
    assert found.turns == 1 and found.forced_stops == 0


def test_the_tokens_that_are_left_bound_an_answer_with_its_phrase():
    half = ForcedStop([0.5, 0.5], "</think>")
    [[found]], sampler = play(lambda text: "x" * 300, SHOP, [{"prompt": "Q"}], forced_stop=half, max_tokens=30)
    assert texts(found, sampler.tokenizer)[1:] == ["x" * 15, "</think>", "x" * 7] and found.finish.reason == "length"
    assert found.turns == 1 and found.forced_stops == 1 and found.text == "x" * 15 + "</think>" + "x" * 7


def test_players_of_a_game_are_stopped_too():
    zero = ForcedStop([0.01, 0.01], "0")

    def says(text):
        return "9" if "000" in text else "00000"

    [group], sampler = play(says, {"count": {"_target_": f"{HERE}.Count"}}, [{"prompt": "Q"}], samples=3,
                            forced_stop=zero)  # fmt: skip
    stopped = ["00", "0", "9" + EOS]
    assert [texts(one, sampler.tokenizer)[1:] for one in group] == [[*stopped, "[9]", "9" + EOS], stopped, stopped]
    assert [(one.turns, one.episode["turns"], one.episode["reward"]) for one in group] == [
        (2, 2, 18.0), (1, 1, 9.0), (1, 1, 9.0)
    ]  # fmt: skip


SEEN = []


def asks_for_tokens(data, base_url, api_key):
    messages = [user(data["prompt"])]
    SEEN.append(fetch(base_url, api_key, messages=messages, logprobs=True, return_token_ids=True)[1])
    messages += [SEEN[-1]["choices"][0]["message"], user("and")]
    fetch(base_url, api_key, messages=messages)
    return 1.0


def test_an_agent_sees_the_answer_with_the_phrase():
    SEEN.clear()
    nodes = {"agent": {"_target_": f"{__name__}.asks_for_tokens"}}

    def write(text):
        return "end" if "and" in text else "yes" if "</think>" in text else "so many words"

    [[found]], sampler = play(write, nodes, [{"prompt": "Q"}], forced_stop=TEN)
    parts = ["Q", "so many wo", "</think>", "yes" + EOS, "and", "end" + EOS]
    assert texts(found, sampler.tokenizer) == parts and found.earlier == ()
    assert found.turns == 2 == found.episode["turns"] and found.forced_stops == 1
    [body] = SEEN
    [choice] = body["choices"]
    assert choice["message"]["content"] == "so many wo</think>yes" and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [token for segment in found.segments[1:4] for token in segment.tokens]
    numbers = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert [number is None for number in numbers] == [False] * 10 + [True] * 8 + [False] * 4
    assert body["usage"]["completion_tokens"] == 22


class Words:
    """Shows two words, four times."""

    def reset(self, **row):
        self._turn = 0

    def step(self, action):
        self._turn += 1
        return f"w5 w{self._turn}", 1.0, self._turn == 4, False, {}


@torch.no_grad()
def test_log_probabilities_of_an_engine_are_those_of_one_forward_over_the_row(tmp_path):
    """The tokens too: each is one that the engine returned, in its order."""
    template = tmp_path / "words.jinja"
    template.write_text("{% for m in messages %}w9 {{ m.content }}{{ eos_token }} {% endfor %}w8")
    own, model = word_tokenizer(40), build()
    own.add_special_tokens({"additional_special_tokens": ["w2"]})
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    bias = torch.zeros(40, dtype=torch.float64)
    bias[END] = 2.5
    model.lm_head.bias = torch.nn.Parameter(bias)  # many answers end before their limit
    engine = hf_engine(model, own, 64)
    sampled = []
    generate = engine.generate

    def recorded(requests, how, announce):
        found = generate(requests, how, announce)
        sampled.extend((request.prompt, one[0].tokens) for request, one in zip(requests, found, strict=True))
        return found

    engine.generate = recorded
    nodes = {"words": {"_target_": f"{__name__}.Words"}}
    environments = Environments.of(EnvironmentOptions(classes=nodes, **OPTIONS))
    answerer = EpisodeAnswerer(environments, Encoder(own, str(template), None), engine, 256)
    seeds, stop = [list(range(12)), list(range(12, 24))], ForcedStop([0.3, 0.5], "w6 w7")
    rows = [{"prompt": "w3 w4"}, {"prompt": "w7"}]
    groups = answerer.answer(RowRequests(rows, seeds, sampling(max_new_tokens=14), stop), lambda *_: None)
    parts, forced, turns = [], 0, 0
    for found in [one for group in groups for one in group]:
        assert found.episode["failed"] is None and not found.earlier and found.turns == found.episode["turns"]
        forced, turns = forced + found.forced_stops, max(turns, found.turns)
        [row] = to_rows(found, group=0, unit=0)
        ids, mask = row["tokens"]["input_ids"], row["response_mask"]
        said = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(row["rollout_logprobs"][mask].double(), said[mask[1:]], atol=1e-5, rtol=0)
        for number, segment in enumerate(found.segments):
            if segment.sampled:
                assert not any(math.isnan(value) for value in segment.logprobs)
                before = [token for earlier in found.segments[:number] for token in earlier.tokens]
                parts.append((before, segment.tokens))
            elif segment.continues:
                assert segment.tokens == [6, 7] and not segment.trains
    assert sorted(parts) == sorted((list(prompt), tokens) for prompt, tokens in sampled)
    assert forced > 10 and turns == 4
