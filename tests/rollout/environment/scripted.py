"""An engine whose answers a function writes, and environments of every kind."""

import sys
import time
from pathlib import Path

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.rollout.engine.base import Completion
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.episodes import EpisodeAnswerer
from rft.rollout.environment.options import EnvironmentOptions, Environments
from rft.rollout.sampler import Sampler

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = str(Path(__file__).parent / "turns_with_tools.jinja")
SAMPLING = Sampling(max_new_tokens=200, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
OPTIONS = {
    "tool_calls": {"name": "hermes"},
    "max_turns": 5,
    "max_tokens": 2000,
    "max_seconds": None,
    "tool_deadline_s": 5.0,
    "tool_max_tokens": 100,
    "workers": "inline",
    "concurrency": 64,
    "renderer": None,
}


class ScriptedSampler(Sampler):
    """Answers a prompt by a function of its text; a log-probability is minus the number of the token.

    Attributes:
        batches: the texts of the prompts of each call.
    """

    def __init__(self, tokenizer, write):
        self.tokenizer = tokenizer
        self.write = write
        self.batches = []

    def generate(self, requests, sampling, on_completion=None):
        prompts = [self.tokenizer.decode(request.prompt) for request in requests]
        self.batches.append(prompts)
        found = []
        for number, request in enumerate(requests):
            text = self.write(prompts[number])
            ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
            most = request.limit(0, sampling)
            reason = "stop" if len(ids) <= most else "length"
            ids = ids[:most]
            shown = self.tokenizer.decode(ids, skip_special_tokens=True)
            completion = Completion(ids, [-float(n) for n in range(len(ids))], reason, shown, [3] * len(ids))
            on_completion(number, 0, completion)
            found.append([completion])
        return found

    def publish(self, version, weights, model="actor"):
        raise AssertionError("nothing trains here")

    def release(self):
        raise AssertionError("nothing trains here")


def play(write, classes, rows, samples=1, template=TEMPLATE, context=4000, forced_stop=None, **options):
    """The trajectories of every row, and the sampler.

    Args:
        write: the text of an answer to the text of a prompt.
        classes: the nodes of the environments by name.
    """
    tokenizer = characters(alphabet=ALPHABET)
    encoder = Encoder(tokenizer, template, None)
    environments = Environments.of(EnvironmentOptions(classes=classes, **{**OPTIONS, **options}))
    sampler = ScriptedSampler(tokenizer, write)
    announced = {}
    answerer = EpisodeAnswerer(environments, encoder, sampler, context)
    try:
        found = answerer.answer(
            rows,
            [[100 * number + sample for sample in range(samples)] for number in range(len(rows))],
            SAMPLING,
            lambda number, sample, trajectory: announced.update({(number, sample): trajectory}),
            forced_stop,
        )
    finally:
        answerer.close()
    assert announced == {(i, j): one for i, group in enumerate(found) for j, one in enumerate(group)}
    return found, sampler


class Shop:
    """Prices of goods. `reset` shows the budget of the row."""

    def __init__(self, currency: str = "EUR") -> None:
        self._currency = currency
        self._asked: list[str] = []

    def reset(self, budget=None, **row):
        self._budget = budget
        return None if budget is None else f" (budget {budget})"

    def price(self, item: str, count: int = 1) -> str:
        """The price of goods.

        Args:
            item: what is bought.
            count: how many.
        """
        self._asked.append(item)
        return f"{len(item) * count} {self._currency}"

    async def stock(self) -> dict:
        """What is in stock."""
        return {"tea": 3}

    def get_reward(self) -> float:
        return float(len(self._asked))


class Faulty:
    """Tools that fail in every way."""

    def reset(self, fails="", **row):
        self._fails = fails
        if fails == "reset":
            raise OSError("no such place")
        return 7 if fails == "type" else None

    def raises(self) -> str:
        """Raises an error."""
        raise ZeroDivisionError("by zero")

    def hangs(self) -> str:
        """Takes long."""
        time.sleep(20)
        return "late"

    def prints(self) -> str:
        """Prints and returns 100 MB."""
        sys.stdout.write("x" * 1000)
        return "y" * 100_000_000

    def bytes(self) -> str:
        """Returns bytes that are no text."""
        return b"\xff\xfe ok"

    def dies(self) -> str:
        """Kills its process."""
        import os

        os.kill(os.getpid(), 9)
        return ""

    def leaves(self) -> str:
        """Calls exit."""
        raise SystemExit(3)

    def get_reward(self) -> float:
        return {"reward": float("nan"), "text": "1"}.get(self._fails, 1.0)


class Guess:
    """Gymnasium's protocol: guess the number of the row."""

    def reset(self, number, **row):
        self._number = number
        return [{"role": "user", "content": " guess:"}]

    def step(self, action):
        if action == "bad":
            return "no tuple"
        if action == "stop":
            return "", -1.0, False, True, {}
        right = action == str(self._number)
        return ("yes" if right else "low" if int(action) < self._number else "high"), float(right), right, False, {}

    def close(self):
        assert self._number != 13, "unlucky"


class Count:
    """A game of three players, who say a number in turn; a reward is the sum of what a player said."""

    players = 3

    def reset(self, fails="", **row):
        self._fails = fails
        self._said = []

    def get_observation(self):
        player = len(self._said) % 3
        if self._fails == "player":
            return 3, ""
        return player, " go" if len(self._said) < 3 else f"[{self._said[-1]}]"

    def step(self, action):
        if action == "raise":
            raise ZeroDivisionError("by zero")
        self._said.append(int(action))
        return action == "9", {}

    def get_rewards(self):
        if self._fails == "rewards":
            return [1.0]
        return [float(sum(self._said[player::3])) for player in range(3)]
