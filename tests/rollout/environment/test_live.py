import pytest

from rft.rollout.environment.hosted import as_text, cut
from rft.rollout.environment.live import _observation


def test_outputs_as_text():
    assert as_text("a") == "a" and as_text(b"\xc3\xa4\xff") == "ä�" and as_text(None) == ""
    assert as_text({"a": [1, "ä"]}) == '{"a": [1, "ä"]}' and as_text(3.5) == "3.5" and as_text({1: object}) != ""


def test_only_texts_are_cut():
    assert cut("abcd", 2) == "ab" and cut(b"abcd", 2) == "ab" and cut([1, 2, 3], 2) == [1, 2, 3]


def test_observations():
    messages = [{"role": "user", "content": "a", "name": "b"}]
    seen = _observation(messages)
    assert seen == messages and seen[0] is not messages[0] and _observation(None) is None
    for wrong in (3, ["a"], [{"role": "user"}], {"role": "user", "content": "a"}):
        with pytest.raises(ValueError, match=r"^it returned"):
            _observation(wrong)
