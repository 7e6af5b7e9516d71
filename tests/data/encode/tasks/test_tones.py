"""The built-in audio task. Answers are found again from the samples alone."""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from omegaconf import OmegaConf

from rft.data.encode.tasks.tones import Tones
from tests.helpers import CONFIG

ALL = ("pitch", "count", "direction")


def load(split="train", count=300, questions=ALL, seconds=(0.08, 0.12), rate=16000, slips=0.5, seed=0, required=()):
    return Tones("data.train", split, count, list(questions), seconds, rate, slips, seed).load(list(required))


def sound_of(row):
    [part] = [part for part in row["prompt"][0]["content"] if part["type"] == "audio"]
    return part["audio"]["array"], part["audio"]["sampling_rate"]


def question_of(row):
    return row["prompt"][0]["content"][-1]["text"]


def tones_in(samples, rate):
    """(Hz, seconds) of the tones of a sound: the parts between silences, by their zero crossings."""
    assert samples.dtype == np.float32 and samples.ndim == 1 and 0.2 < abs(samples).max() <= 1
    window = int(0.01 * rate)
    loud = np.convolve(abs(samples), np.ones(window), "same") / window > 0.01
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loud, [False]]).astype(int)))
    found = []
    for start, end in edges.reshape(-1, 2):
        part = samples[start:end]
        before = np.flatnonzero(np.diff(np.signbit(part)))
        crossings = before + part[before] / (part[before] - part[before + 1])
        found.append(((len(crossings) - 1) / 2 / (crossings[-1] - crossings[0]) * rate, (end - start) / rate))
    return found


def melody(row):
    """The frequencies of a sound in whole Hz: for each tone the sine that is most similar to its samples."""
    samples, rate = sound_of(row)
    tones, pause = tones_in(samples, rate), int(0.04 * rate)
    length = (len(samples) - pause * (len(tones) - 1)) // len(tones)
    time, found = np.arange(length) / rate, []
    for number, (hertz, _) in enumerate(tones):
        part = samples[number * (length + pause) :][:length]
        near = range(round(hertz) - 4, round(hertz) + 5)
        found.append(max(near, key=lambda other: part @ np.sin(2 * np.pi * other * time)))
    return tuple(found)


def right(row):
    tones = [hertz for hertz, _ in tones_in(*sound_of(row))]
    if question_of(row) == "how many?":
        return str(len(tones))
    if question_of(row) == "low or high?":
        [band] = {"low" if hertz < 500 else "middle" if hertz < 1300 else "high" for hertz in tones}
        return band
    assert question_of(row) == "which way?" and len(tones) > 1
    [step] = {round(after / before, 1) for before, after in itertools.pairwise(tones)}
    return {1.5: "rising", 0.7: "falling", 1.0: "level"}[step]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_are_right(split):
    rows = load(split)
    assert len(rows) == 300
    for row in rows:
        assert right(row) == row["answer"] == row["response"] == row["chosen"] != row["rejected"]
        assert row["demonstration"] in (row["answer"], f"{row['chosen']} or {row['rejected']}")
        assert row["completion"] == row["chosen" if row["label"] else "rejected"]
        assert sound_of(row)[1] == 16000
    assert 100 < sum(row["label"] for row in rows) < 200


def test_durations_and_the_sampling_rate():
    for row in load(seconds=(0.05, 0.2), rate=24000):
        samples, rate = sound_of(row)
        tones = tones_in(samples, rate)
        assert rate == 24000 and all(0.04 < seconds < 0.23 for _, seconds in tones)
        tone = (len(samples) / rate - 0.04 * (len(tones) - 1)) / len(tones)
        assert 0.05 - 1e-3 < tone < 0.2 + 1e-3
    assert len({len(sound_of(row)[0]) for row in load(count=30)}) > 20


def test_samples_are_the_same_on_every_machine():
    digest = hashlib.sha256()
    for row in load(count=50):
        digest.update(sound_of(row)[0].tobytes())
        digest.update(f"{question_of(row)}{row['answer']}{row['demonstration']}".encode())
    assert digest.hexdigest() == "6d1dd79933ee2d4e05dc89045dc94d34cc3db2cbe32f2ba4cdac73da94251385"


def test_a_row_is_the_same_whenever_it_is_read():
    rows, again, other = load(seed=4), load(seed=4), load(seed=5)

    def content(row):
        return question_of(row), row["answer"], sound_of(row)[0].tobytes()

    assert [content(row) for row in rows] == [content(row) for row in rows] == [content(row) for row in again]
    assert [content(row) for row in rows] != [content(row) for row in other]


def test_train_and_held_out_share_no_melody():
    train, held_out = (
        {melody(row) for row in load(split, count)} for split, count in (("train", 600), ("heldout", 150))
    )
    assert len(train) > 500 and len(held_out) > 120
    assert not train & held_out


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_to_a_question_are_equally_frequent(split):
    """An answer without the sound is right in 1 of 3 rows."""
    answers = {}
    for row in load(split, count=3000):
        answers.setdefault(question_of(row), Counter())[row["answer"]] += 1
    assert len(answers) == 3
    for counts in answers.values():
        assert len(counts) == 3 and 900 < sum(counts.values()) < 1100
        assert all(abs(count / sum(counts.values()) - 1 / 3) < 0.06 for count in counts.values())


def test_slips_are_the_share_of_demonstrations_with_two_answers():
    rows = load(count=2000, slips=0.6)
    assert abs(sum(row["demonstration"] != row["answer"] for row in rows) / 2000 - 0.6) < 0.05


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": (0.2, 0.1)}, r"^data\.train\.seconds=\[0\.2, 0\.1\]: put the smaller number first$"),
        ({"questions": ()}, r"^data\.train\.questions is empty"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        load(**options)


def test_a_field_that_the_task_does_not_have():
    with pytest.raises(ValueError, match=r"^data\.train: the built-in tasks have no field 'rationale'"):
        load(required=("rationale",))


def test_the_alphabet_of_the_tiny_model_has_every_character():
    alphabet = OmegaConf.load(CONFIG / "actor" / "tiny_audio.yaml").tokenizer.alphabet
    texts = [
        text for row in load() for text in (question_of(row), row["answer"], row["rejected"], row["demonstration"])
    ]
    assert set("".join(texts)) <= set(alphabet)
