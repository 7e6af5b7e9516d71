"""The mean and the deviation in the config of a reward model."""

import json

import pytest
import torch
from transformers import AutoConfig

from rft.actor.score_moments import ScoreMoments, forget_moments, read_moments, save_moments, score_moments
from tests.helpers import MODEL


def saved(folder, **numbers):
    AutoConfig.for_model(**MODEL, **numbers).save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


def test_moments_by_hand():
    found = score_moments(torch.tensor([1.0, 2.0, 6.0]))
    assert found == ScoreMoments(mean=3.0, std=pytest.approx(7.0**0.5))  # (4 + 1 + 9) / 2
    assert [ScoreMoments(3.0, 2.0).normalize(score) for score in (1.0, 3.0, 8.0)] == [-1.0, 0.0, 2.5]


def test_a_model_keeps_them_until_it_trains(tmp_path):
    assert read_moments(saved(tmp_path), "m") is None
    before = json.loads((tmp_path / "config.json").read_text())
    save_moments(ScoreMoments(0.1, 0.7), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert read_moments(config, "m") == ScoreMoments(0.1, 0.7)
    assert json.loads((tmp_path / "config.json").read_text()) == before | {"mean": 0.1, "std": 0.7}
    forget_moments(config)
    assert read_moments(config, "m") is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"mean": 0.0, "std": 0.0}, r"^m\.std=0.0: it must be above 0"),
        ({"mean": float("nan"), "std": 1.0}, r"^m\.mean=nan: it must be finite"),
        ({"mean": [0.5, 0.5], "std": 1.0}, r"^m\.mean: expected number"),
        ({"mean": 0.5}, r"^m\.std is missing"),
    ],
)
def test_what_are_no_moments_is_refused(tmp_path, numbers, message):
    with pytest.raises(ValueError, match=message):
        read_moments(saved(tmp_path, **numbers), "m")
