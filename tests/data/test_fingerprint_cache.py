"""Counts that are remembered are those of the very same rows, or counted again."""

import subprocess
import sys

import pytest

from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.media.processor import ModelProcessor, slots_of_template
from rft.data.encode.tokenizer import characters
from rft.data.fingerprint import digest, recall, remember
from rft.data.given.supervised import DatasetSource
from rft.distributed import SINGLE_PROCESS
from tests.families import family, picture

ROWS = [{"prompt": "1" * (1 + n % 9), "response": "2" * (n % 5)} for n in range(2500)]
FEW = ROWS[:40]
GIVEN = GivenTexts(DatasetSource, DatasetSource.Options(response="response"))


class Counting(Encoder):
    """Says how many prompts and examples it and its copies were asked for."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._asked = []

    @property
    def asked(self):
        return len(self._asked)

    def whole_prompts(self, rows):
        self._asked += rows
        return super().whole_prompts(rows)

    def weighted_example(self, row, overlong=None):
        self._asked.append(row)
        return super().weighted_example(row, overlong)


def encoder(*options, alphabet="12", template="none"):
    return Counting(characters(alphabet=alphabet), template, *options or (None,))


def count(folder, rows=ROWS, made=None, world=SINGLE_PROCESS):
    """(what was counted, how many rows were encoded for it)."""
    made = made or encoder()
    return Lengths(world, made, folder and str(folder)).prompts(rows).tolist(), made.asked


def test_a_file_that_has_changed_is_read_again(tmp_path):
    one = family("llava")
    processor = ModelProcessor(one.processor, slots_of_template(one.processor, one.kinds))
    file, cache = tmp_path / "a.png", tmp_path / "cache"
    picture(0).save(file)
    asked = [{"type": "image", "image": str(file)}, {"type": "text", "text": "?"}]
    rows = [{"prompt": [{"role": "user", "content": asked}], "response": "2"}]

    def read():
        made = Counting(processor.tokenizer, "chat", None, processor=processor)
        return count(cache, rows, made)[1]

    assert (read(), read()) == (1, 0)
    picture(1, 24, 24).save(file)
    assert (read(), read()) == (1, 0)
    processor.keeps_raw = True  # an engine that takes other media
    assert (read(), read()) == (1, 0)
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"^row 1: .*a\.png cannot be read as an image"):
        read()


def test_rows_are_encoded_once_over_all_ranks_and_not_again(tmp_path, ranks):
    expected = [len(row["prompt"]) for row in ROWS]
    shared = ranks(3, lambda world: count(tmp_path, world=world))
    assert [asked for _, asked in shared] == [834, 833, 833] and all(counts == expected for counts, _ in shared)
    assert count(tmp_path) == (expected, 0), "on another number of ranks"
    assert count(None) == (expected, 2500)


def test_whatever_decides_the_counts_is_looked_at(tmp_path, monkeypatch):
    chat, chats = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if x %}1{% endif %}", []
    for number, text in enumerate((chat, chat + " ")):
        chats.append(tmp_path / f"{number}.jinja")
        chats[-1].write_text(text)
    path = str(chats[0])
    others = [
        (FEW, encoder()), (FEW[1:], encoder()), (FEW[:-1], encoder()),
        ([*FEW[:-1], {"prompt": "12", "response": ""}], encoder()), ([FEW[1], FEW[0], *FEW[2:]], encoder()),
        (FEW, encoder(alphabet="21")), (FEW, encoder(template=path)), (FEW, encoder(template=str(chats[1]))),
        (FEW, encoder("1", template=path)), (FEW, encoder(None, None, "response", {"x": 1}, template=path)),
    ]  # fmt: skip
    for rows, made in others:
        count(tmp_path / "cache", rows, made)
        assert made.asked == len(rows), "nothing of the others is taken for these"
    again = [{"response": "other", "more": None, **row} for row in FEW]
    assert count(tmp_path / "cache", again)[1] == 0, "what a prompt is not made of may change"
    monkeypatch.setattr("rft.data.encode.lengths.VERSIONS", ["2.0"])
    assert count(tmp_path / "cache", FEW)[1] == 40


def test_texts_are_remembered_by_their_source(tmp_path, ranks):
    def texts(given=GIVEN, rows=FEW, world=SINGLE_PROCESS):
        made = encoder()
        return [part.tolist() for part in Lengths(world, made, str(tmp_path)).texts(given, rows)], made.asked

    shared = ranks(3, lambda world: texts(world=world))
    sizes = [(len(row["prompt"]), len(row["response"])) for row in FEW]
    tokens, least = [one + other + 1 for one, other in sizes], [one + 1 for one, _ in sizes]
    expected = [tokens, least, [0] * 40, [[1, 0, 0, 0]] * 40]
    assert [asked for _, asked in shared] == [14, 13, 13] and all(counts == expected for counts, _ in shared)
    assert texts() == (expected, 0)
    assert texts(rows=[*FEW[1:], {"prompt": "1", "response": "2"}])[1] == 40
    assert texts(given=GivenTexts(DatasetSource, DatasetSource.Options(response="prompt")))[1] == 40


def test_a_damaged_or_exchanged_entry_is_counted_again(tmp_path):
    expected, _ = count(tmp_path, FEW)
    [entry] = tmp_path.iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:-4], whole[:-1] + b"\1", b"", whole[:20]):
        entry.write_bytes(damaged)
        assert count(tmp_path, FEW) == (expected, 40)
        assert entry.read_bytes() == whole and count(tmp_path, FEW) == (expected, 0)
    other = tmp_path / digest("other").hex()
    entry.rename(other)
    assert recall(tmp_path, digest("other")) is None, "an entry under another's name"


def test_two_that_write_at_once_leave_one_whole_entry(tmp_path):
    work = (
        "import sys; from pathlib import Path; from rft.data.fingerprint import recall, remember\n"
        "folder, name = Path(sys.argv[1]), b'n' * 20\n"
        "for turn in range(150):\n"
        "    remember(folder, name, [int(sys.argv[2])] * 5000)\n"
        "    assert recall(folder, name).tolist() in ([1] * 5000, [2] * 5000)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", work, str(tmp_path), number]) for number in "12"]
    assert [one.wait(60) for one in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [(b"n" * 20).hex()]
    remember(tmp_path, b"m" * 20, [])
    assert recall(tmp_path, b"m" * 20).tolist() == [] and recall(tmp_path / "none", b"m" * 20) is None


def test_a_folder_that_cannot_be_written_to_is_said_and_no_more(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert count(tmp_path / "file", FEW)[1] == 40
    assert "rows are counted each time" in caplog.text


def test_what_is_wrong_with_a_row_is_said_on_every_rank_with_its_number(tmp_path, ranks):
    rows = [{"prompt": "1"}, {"prompt": "12"}, {"prompt": ""}, {"prompt": "1"}]

    def said(world):
        try:
            return count(tmp_path, rows, world=world)
        except ValueError as error:
            return str(error)

    assert ranks(2, said) == ["row 3: the prompt is empty; remove the row"] * 2
