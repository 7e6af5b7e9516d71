"""Media on the page: pictures and players, each content once, a bound on all of them, nothing but media of the run."""

import base64
import json
from pathlib import Path
from typing import Any

from rft.report.media import MOST_MIB
from rft.report.run_page import write_report
from tests.data.media_parts import RED, png
from tests.report.test_run_page import EVIL, Tags


def line(*names: str, text: str = "which colour?", kind: str = "image") -> dict[str, Any]:
    parts = [{"type": kind, kind: f"../media/{name}"} for name in names]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"set": "train", "prompt": prompt, "response": "red", "score": 1.0}


def report(run: Path, steps: list[list[dict[str, Any]]], **files: bytes) -> tuple[str, Tags]:
    """The page of a run with these lines and files."""
    for folder in ("trajectories", "media"):
        (run / folder).mkdir()
    for step, rows in enumerate(steps):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run / "trajectories" / f"step_{step:08d}.jsonl").write_text(text)
    for name, data in files.items():
        (run / "media" / name.replace("_", ".")).write_bytes(data)
    text = write_report(run).read_text(encoding="utf-8")
    return text, Tags(text)


def test_a_picture_is_shown_with_each_answer_and_is_on_the_page_once(tmp_path: Path) -> None:
    text, page = report(tmp_path, [[line("1a.png")] * 3, [line("1a.png")]], **{"1a_png": RED})
    assert page.tags.count("img") == 4 and text.count(base64.b64encode(RED).decode()) == 1
    assert page.attributes.count(("data-same", "1a.png")) == 3 and ("id", "1a.png") in page.attributes
    assert ("class", "medium tiny") in page.attributes, "few pixels are enlarged"
    assert page.text.count("which colour?") == 4 and "../media" not in page.text
    assert f"at most {MOST_MIB} MiB" in page.text


def test_a_large_picture_is_not_enlarged_and_a_sound_has_a_player(tmp_path: Path) -> None:
    rows = [line("1a.png"), line("2b.wav", kind="audio")]
    text, page = report(tmp_path, [rows], **{"1a_png": png("red", 300), "2b_wav": b"RIFF"})
    assert ("class", "medium tiny") not in page.attributes and ("class", "medium") in page.attributes
    assert page.tags.count("audio") == 1 and ("controls", None) in page.attributes
    assert ("src", f"data:audio/wav;base64,{base64.b64encode(b'RIFF').decode()}") in page.attributes
    assert "media-src data:" in text


def test_over_the_bound_the_last_step_has_its_media_and_the_others_are_links(tmp_path: Path) -> None:
    half = b"RIFF" + b"\0" * (MOST_MIB * 2**19)
    steps = [[line(f"{step}.wav", kind="audio")] for step in range(3)]
    text, page = report(tmp_path, steps, **{f"{step}_wav": half for step in range(3)})
    assert page.tags.count("audio") == 1 and ("id", "2.wav") in page.attributes
    assert [value for name, value in page.attributes if name == "href"] == ["media/0.wav", "media/1.wav"]
    assert len(text) < MOST_MIB * 2**20 * 4 / 3 + 50_000


def test_roles_are_shown_where_there_are_several_messages(tmp_path: Path) -> None:
    row = line("1a.png")
    row["prompt"] = [{"role": "system", "content": "be brief"}, *row["prompt"], {"role": "assistant", "content": None}]
    _, page = report(tmp_path, [[row]], **{"1a_png": RED})
    assert all(word in page.text for word in ("system", "be brief", "user"))


def test_a_missing_file_is_a_link_and_a_text_is_escaped(tmp_path: Path) -> None:
    rows = [line("1a.png", text=EVIL), line("../../secret.png"), line("1a.svg")]
    _, page = report(tmp_path, [rows])
    assert "img" not in page.tags and page.tags.count("script") == 1 and "alert(1)" in page.text
    assert [value for name, value in page.attributes if name in ("src", "href")] == ["media/1a.png"]


def test_a_run_of_text_has_no_note_on_media(tmp_path: Path) -> None:
    _, page = report(tmp_path, [[{"prompt": [{"role": "user", "content": "a"}], "response": "b"}]])
    assert '[{"role": "user", "content": "a"}]' in page.text and "MiB of media" not in page.text
