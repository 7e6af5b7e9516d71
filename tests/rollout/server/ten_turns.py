"""Dialogues of ten turns with a real engine, whose log-probabilities are those of the model for the whole dialogue."""

import torch

from rft.data.encode.encoder import Encoder
from rft.rollout.answerer import RowRequests
from rft.rollout.environment.episodes import EpisodeAnswerer
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.scripted import OPTIONS

TURNS = 10


class Echo:
    """Answers with the length of an answer, ten times."""

    def reset(self, **row):
        self._turn = 0

    def step(self, action):
        self._turn += 1
        return f"{len(action)} ", 0.0, self._turn == TURNS, False, {}


def gap_of_ten_turns(engine, model, sampling):
    """The largest difference between the log-probabilities of the engine and of the model.

    Args:
        sampling: of temperature 1, and of at most so many tokens that ten turns fit into 256.
    """
    node = {"_target_": f"{__name__}.Echo"}
    environments = Environments.of(EnvironmentOptions(classes={"echo": node}, **{**OPTIONS, "max_turns": TURNS}))
    answerer = EpisodeAnswerer(environments, Encoder(engine.context.tokenizer, "turns", None), engine, 256)
    rows, differences, turns = [{"prompt": "ab 12"}, {"prompt": "7"}], [], []
    asked = RowRequests(rows, [list(range(32)), list(range(32, 64))], sampling)
    for group in answerer.answer(asked, lambda *_: None):
        for trajectory in group:
            assert trajectory.episode["failed"] is None and not trajectory.earlier
            turns.append(trajectory.turns)
            ids = torch.tensor([[token for segment in trajectory.segments for token in segment.tokens]])
            said = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]  # (T - 1,)
            start = 0
            for segment in trajectory.segments:
                end = start + len(segment.tokens)
                if segment.sampled:
                    differences.append((said[start - 1 : end - 1] - torch.tensor(segment.logprobs)).abs().max().item())
                start = end
    assert max(turns) == TURNS, "some dialogues have ten answers that end before their limit"
    return max(differences)
