"""The built-in audio task: sounds of one to three sine tones, and questions about them."""

import math
import random
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from rft.conditions import ReadWith
from rft.data.encode.tasks.generated import Asked, MediaRows, Split, following, in_split
from rft.ranges import Fraction, Range, Seed

BANDS = {"low": (200, 400), "middle": (600, 1000), "high": (1600, 2600)}  # Hz
COUNTS = ("1", "2", "3")
INTERVALS = {"rising": 3 / 2, "falling": 2 / 3, "level": 1.0}  # ratio of the frequencies of neighbours
QUESTIONS = {"pitch": "low or high?", "count": "how many?", "direction": "which way?"}
ANSWERS = {"pitch": tuple(BANDS), "count": COUNTS, "direction": tuple(INTERVALS)}
START = (600, 1000)  # Hz of the first tone, if its neighbours are an interval away
PAUSE = 0.04  # seconds between tones
FADE = 0.005  # seconds in which a tone begins and ends
LOUDNESS = (0.3, 0.9)
Seconds = Annotated[float, Range(low=0.02, high=2.0)]
Sound = tuple[tuple[int, ...], int, float]  # Hz of the tones, samples of each, loudness


@dataclass
class Tones(MediaRows):
    """Rows about sounds: "how many?", "2".

    The questions are about the pitch of the tones (low, middle, high), their number (1 to 3) and their direction
    (rising, falling, level). The answers to a question are equally frequent: chance is 1/3. A row has the fields of
    `Symbolic`, without `text`. Its prompt is one message of the user, whose content is the sound and the question.

    Samples are float32 between -1 and 1, rounded to 16 bits, so that all machines draw the same ones.

    Args:
        key: supplied by the run: the yaml key.
        split: training sounds or held-out ones (one in ten, by the checksum of their frequencies).
        count: number of rows, all different.
        questions: the questions, which are equally frequent.
        seconds: shortest and longest duration of a tone; all tones of a sound have the same one.
        sampling_rate: samples per second.
        slips: share of the demonstrations that name a wrong answer after the right one.
        seed: seed of the random tones.

    Raises:
        ValueError: the range of durations is empty, or there are no questions.
    """

    key: str
    split: Split
    count: Annotated[int, Range(low=1, high=1_000_000)]
    questions: list[Literal["pitch", "count", "direction"]]
    seconds: tuple[Seconds, Seconds]
    sampling_rate: Annotated[int, Range(low=8000, high=192_000)]
    slips: Annotated[Fraction, ReadWith("field demonstration")]
    seed: Seed

    def __post_init__(self) -> None:
        if self.seconds[0] > self.seconds[1]:
            raise ValueError(f"{self.key}.seconds={list(self.seconds)}: put the smaller number first")
        if not self.questions:
            raise ValueError(f"{self.key}.questions is empty: name pitch, count or direction")

    def ask(self, rng: random.Random) -> Asked:
        kind = rng.choice(self.questions)
        answer = rng.choice(ANSWERS[kind])
        while True:
            tones = _drawn(rng, kind, answer)
            if in_split(tones, self.split):  # drawn again with the same answer: answers stay equally frequent
                break
        samples = rng.randint(*(int(length * self.sampling_rate) for length in self.seconds))
        sound = (tones, samples, round(rng.uniform(*LOUDNESS), 3))
        return Asked(sound, QUESTIONS[kind], answer, following(ANSWERS[kind], answer))

    def parts(self, media: Sound) -> list[dict[str, Any]]:
        rate = self.sampling_rate
        return [{"type": "audio", "audio": {"array": _samples(*media, rate), "sampling_rate": rate}}]


def _drawn(rng: random.Random, kind: str, answer: str) -> tuple[int, ...]:
    """The frequencies of the tones of a sound, in Hz."""
    if kind == "pitch":
        return tuple(rng.randint(*BANDS[answer]) for _ in range(rng.randint(1, 3)))
    if kind == "count":
        return tuple(rng.randint(*BANDS[rng.choice(list(BANDS))]) for _ in range(int(answer)))
    ratio, start = INTERVALS[answer], rng.randint(*START)
    return tuple(round(start * ratio**place) for place in range(rng.randint(2, 3)))


def _samples(tones: tuple[int, ...], length: int, loudness: float, rate: int) -> np.ndarray:
    """A sound (samples,): tones of `length` samples with pauses between them."""
    time = np.arange(length) / rate
    fade = np.minimum(1, np.minimum(time, time[::-1]) / FADE)
    pause = np.zeros(int(PAUSE * rate))
    pieces = [piece for tone in tones for piece in (np.sin(2 * math.pi * tone * time) * fade, pause)]
    return np.round(np.concatenate(pieces[:-1]) * loudness * 32767).astype(np.int16) / np.float32(32768)
