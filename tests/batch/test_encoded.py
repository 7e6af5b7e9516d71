"""Token ids keep their columns and media through sums, parts and rows."""

import pickle

import torch

from rft.batch.encoded import EncodedText, RawText, as_encoded
from rft.batch.trajectory import Trajectory, given_segments, to_row

IMAGE, OTHER = {"pixels": torch.ones(2, 3)}, {"pixels": torch.zeros(1, 3)}
ONE = EncodedText([1, 2, 3], {"types": [0, 1, 1]}, IMAGE)


def test_a_sum_has_the_columns_and_the_media_of_both():
    longer = ONE + EncodedText([4, 5])
    assert longer == [1, 2, 3, 4, 5] and longer.column("types") == [0, 1, 1, 0, 0] and longer.media is IMAGE
    behind = EncodedText([9]) + ONE
    assert behind == [9, 1, 2, 3] and behind.column("types") == [0, 0, 1, 1] and behind.media is IMAGE
    both = ONE + EncodedText([7], {"other": [5]}, OTHER)
    assert both.column("other") == [0, 0, 0, 5] and both.column("types") == [0, 1, 1, 0]
    assert torch.equal(both.media["pixels"], torch.cat([IMAGE["pixels"], OTHER["pixels"]]))
    assert as_encoded(ONE) is ONE and as_encoded([1]).media is None


def test_a_sum_has_the_raw_forms_of_both():
    """An engine with its own processor gets the tokens around unexpanded slots, and all media in their order."""
    picture, sound = object(), object()
    prompt = EncodedText([1, 3, 3, 3], media=IMAGE, raw=RawText([1, 3], {"image": [picture]}))
    assert (EncodedText([9]) + prompt).raw == RawText([9, 1, 3], {"image": [picture]})
    tail = [5]
    both = prompt + tail + EncodedText([4, 4], media=OTHER, raw=RawText([4], {"image": [sound], "audio": [sound]}))
    assert both == [1, 3, 3, 3, 5, 4, 4]
    assert both.raw == RawText([1, 3, 5, 4], {"image": [picture, sound], "audio": [sound]})
    assert (EncodedText([1]) + tail).raw is None


def test_the_first_part_has_the_media():
    first, second = ONE.part(0, 2), ONE.part(2, 3)
    assert (first, second) == ([1, 2], [3]) and (first.media, second.media) == (IMAGE, None)
    assert first.column("types") + second.column("types") == [0, 1, 1]


def test_a_copy_by_pickle_is_equal():
    copied = pickle.loads(pickle.dumps(ONE))
    assert copied == ONE and copied.columns == ONE.columns and torch.equal(copied.media["pixels"], IMAGE["pixels"])


def test_a_row_has_the_columns_and_shares_the_media():
    trains = [False, True, True]
    row = to_row(Trajectory(given_segments(ONE, trains), None, {"prompt": object(), "n": 1}), group=0, unit=0)
    assert row["tokens"]["types"].tolist() == [0, 1, 1] and row["media"] is IMAGE
    assert row["response_mask"].tolist() == trains and row["fields"] == {"prompt": "<object>", "n": 1}
