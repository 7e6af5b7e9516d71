"""`mode=generate`: completions in the order of the input, the same bytes however often it was interrupted."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import rft
from rft.data.encode.parts import media_of
from rft.modes.generate import generate, output_row, read
from rft.rollout.engine.hf import HFEngine

ROOT = Path(rft.__file__).parent.parent
ROWS = [{"id": number, "question": f"add {number}{number}="} for number in range(11)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


@pytest.fixture
def generated(config, prompts, tmp_path):
    """Generates; returns the bytes of the output and what is printed."""

    def run(*overrides, output="out.jsonl", rows=11):
        console = Console(file=io.StringIO(), width=200)
        mine = ("mode=generate", f"generate.input={prompts}", "generate.prompt=question", "generate.chunk=4")
        done = generate(config(*mine, f"generate.output={tmp_path / output}", *overrides), console)
        assert done == rows
        return (tmp_path / output).read_bytes(), console.file.getvalue()

    return run


def test_completions_stand_beside_their_prompts(generated):
    output, printed = generated("generate.samples=2")
    lines = [json.loads(line) for line in output.splitlines()]
    assert [{"id": line["id"], "question": line["question"]} for line in lines] == ROWS
    for line in lines:
        assert len(line["completions"]) == 2
        for completion in line["completions"]:
            assert completion.keys() == {"text", "tokens", "finish_reason"}
            assert 1 <= completion["tokens"] <= 4 and completion["finish_reason"] in ("stop", "length")
    assert len({line["completions"][0]["text"] for line in lines}) > 1
    assert any(line["completions"][0] != line["completions"][1] for line in lines)
    assert "11 rows, completed by" in printed and "step_00000003/actor" in printed.replace("\n", "")


@pytest.mark.parametrize("ending", ["json", "csv", "parquet"])
def test_the_format_of_the_input_does_not_matter(ending, generated, tmp_path):
    """The same completions as from jsonl; a csv file has texts in all fields."""
    file = tmp_path / f"prompts.{ending}"
    if ending == "json":
        file.write_text(json.dumps(ROWS))
    elif ending == "csv":
        file.write_text("id,question\n" + "".join(f"{row['id']},{row['question']}\n" for row in ROWS))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    expected = [json.loads(line) for line in generated()[0].splitlines()]
    found = [json.loads(line) for line in generated(f"generate.input={file}", output="b.jsonl")[0].splitlines()]
    assert [row | {"id": int(row["id"])} for row in found] == expected


def test_several_files_are_one_input(generated, tmp_path):
    for name, rows in (("part-1.jsonl", ROWS[:3]), ("part-2.json", ROWS[3:])):
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    assert generated(f"generate.input='{tmp_path}/part-*'", output="b.jsonl")[0] == generated()[0]


def test_a_field_that_json_cannot_hold_names_its_row(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b"], "raw": [None, b"x"]}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet row 2: the output is jsonl, .*bytes is not JSON"):
        read(str(tmp_path / "rows.parquet"), "prompt")


def test_media_of_the_input_are_in_its_prompts_and_in_the_output(tmp_path):
    """The output can be read again: paths are absolute, and bytes are in files beside it, each once."""
    (tmp_path / "a.png").write_bytes(b"x")
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "<image>a", "image": {"path": "a.png"}}, {"question": "b", "image": "data:;base64,eA=="}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(str(file), "question")
    values = [str(tmp_path / "a.png"), b"x"]
    assert [media_of(row["question"]) for row in found] == [[("image", value)] for value in values]
    lines = [output_row(row, [], tmp_path) for row in [*found, found[1]]]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [stored] = (tmp_path / "media").iterdir()
    assert stored.read_bytes() == b"x" and stored.suffix == ".bin"
    again = read(str(tmp_path / "out.jsonl"), "question")
    assert [media_of(row["question"]) for row in again] == [
        [("image", value)] for value in (values[0], str(stored), str(stored))
    ]
    file.write_text(json.dumps({"question": "a", "image": "b.png"}))
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: the field 'image': there is no file .*/b\.png"):
        read(str(file), "question")
    file.write_text(json.dumps({"question": "a", "agent_name": "tool_agent"}))
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: the field 'agent_name' asks for tools"):
        read(str(file), "question")


def test_the_size_of_chunks_does_not_matter(generated):
    assert generated("generate.chunk=1", output="a.jsonl")[0] == generated("generate.chunk=64", output="b.jsonl")[0]


def test_greedy_completions_are_the_greedy_answers_of_an_evaluation(generated):
    """And so they do not depend on the seed, and truncation and temperature do not touch them."""
    greedy = generated("generate.greedy=true", output="a.jsonl")[0]
    assert greedy == generated("generate.greedy=true", "seed=5", "rollout.top_k=2", output="b.jsonl")[0]
    assert greedy != generated(output="c.jsonl")[0]


def test_wherever_it_was_cut_it_ends_as_if_it_had_not_been(generated, tmp_path):
    whole, _ = generated()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in (5, ends[2] + 3, ends[3], ends[7] - 1, ends[9]):
        (tmp_path / "out.jsonl").write_bytes(whole[:cut])
        again, printed = generated()
        assert again == whole, cut
        chunks = sum(end <= cut for end in ends) // 4
        assert (f"holds {4 * chunks} of 11 rows: resuming after them" in printed) == (chunks > 0)


def test_a_whole_output_is_left_alone(generated, unloaded, tmp_path):
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    with pytest.raises(pytest.fail.Exception, match="a model was loaded"):
        generated()
    (tmp_path / "out.jsonl").write_bytes(whole)
    assert generated()[0] == whole


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("generate.samples=2", "generate.samples"),
        ("generate.greedy=true", "generate.greedy"),
        ("generate.prompt=id2", "generate.prompt"),
        ("generate.checkpoint=1", "generate.checkpoint"),
        ("generate.checkpoint=null", "generate.checkpoint"),
        ("seed=1", "seed"),
        ("rollout.temperature=0.5", "rollout.temperature"),
        ("rollout.max_new_tokens=3", "rollout.max_new_tokens"),
        ("rollout.stop=[a]", "rollout.stop"),
        ("rollout/first_token=high_temperature", "rollout.first_token"),
    ],
)
def test_another_setting_is_refused_by_name(override, key, generated, prompts, tmp_path, unloaded):
    prompts.write_text("".join(json.dumps(row | {"id2": f"sort {row['id']}="}) + "\n" for row in ROWS))
    with pytest.raises(pytest.fail.Exception, match="a model was loaded"):
        generated()
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(ValueError, match=rf"^{key}: .*out.jsonl was begun with .* set generate.output to another file"):
        generated(override)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_input_is_refused_by_name(generated, prompts, tmp_path):
    generated()
    prompts.write_text(prompts.read_text().replace("add 33=", "add 34="))
    with pytest.raises(ValueError, match=r"^generate.input: .* was begun with 'sha256 [0-9a-f]{64}'"):
        generated()
    (tmp_path / "out.jsonl").unlink()
    assert len(generated()[0].splitlines()) == 11, "begun anew"


def test_a_file_of_someone_elses_is_not_touched(generated, tmp_path, unloaded):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(
        ValueError, match=r"^generate.output=.*out.jsonl: the file exists, and mode=generate did not write it"
    ):
        generated()
    assert (tmp_path / "out.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generate.input=null"], "generate.input is null: give the path of a file with prompts \\(jsonl"),
        (["generate.input=no.jsonl"], "generate.input=no.jsonl: there is no such file"),
        (["generate.prompt=qestion"], "no field .qestion. .*did you mean question.*; set generate.prompt"),
        (["generate.checkpoint=9"], "generate.checkpoint=9: .* its checkpoints are of the steps 1, 2, 3"),
        (["evaluate.checkpoint=9"], "generate.checkpoint=9: "),
        (["generate.samples=0"], "generate.samples=0: it must be at least 1"),
        (["generate.chunk=0"], "generate.chunk=0: it must be at least 1"),
        (["generate.greedy=true", "generate.samples=2"], "generate.samples=2: greedy answers to one prompt are all"),
        (["rollout.max_new_tokens=125"], "generate.input: the prompt of row 11 has 9 tokens; with rollout.max_new"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(overrides, message, generated, unloaded, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        generated(*overrides)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_input(generated, prompts, unloaded):
    prompts.write_text("\n")
    with pytest.raises(ValueError, match=r"generate.input=.*prompts.jsonl: the file holds no rows"):
        generated()


def test_an_engine_that_fails_leaves_whole_chunks(generated, monkeypatch, tmp_path):
    whole, _ = generated(output="whole.jsonl")
    real, calls = HFEngine.generate, []

    def fails(self, requests, sampling, on_completion=None):
        calls.append(len(requests))
        if len(calls) == 3:
            raise RuntimeError("the engine is lost")
        return real(self, requests, sampling, on_completion)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", fails)
        with pytest.raises(RuntimeError, match="the engine is lost"):
            generated()
    assert calls == [4, 4, 3]
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 8
    assert generated()[0] == whole
    assert not list(tmp_path.glob("generate-*")), "nothing stays beside the run"


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again(finished, generated, prompts, tmp_path):
    """The command itself, with SIGKILL: the same bytes as of a run that was left alone."""
    prompts.write_text("".join(json.dumps({"id": n, "question": f"add {n}="}) + "\n" for n in range(200)))
    output = tmp_path / "killed.jsonl"
    said = (f"generate.input={prompts}", "generate.prompt=question", f"generate.output={output}", "generate.chunk=4")
    words = [*finished[0], "mode=generate", f"output_dir={tmp_path / 'run'}", *said]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "rft.main", *words], env=environment, cwd=tmp_path) as process:
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 20):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it had ended"
    assert 20 <= output.read_bytes().count(b"\n") < 200
    assert generated(output=output.name, rows=200)[0] == generated(output="whole.jsonl", rows=200)[0]
