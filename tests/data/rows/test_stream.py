"""Rows that are read as they are drawn."""

import json

import pytest

from rft.batch.columns import fields
from rft.data.encode.encoder import Encoder
from rft.data.encode.stream_limits import short_prompts
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import PromptLimit
from rft.data.given.pairs import PairSource
from rft.data.given.supervised import DatasetSource
from rft.data.rows.sources import FileRows, HubRows
from rft.data.rows.stream import RowStream
from rft.data.sampler import make_sampler
from rft.metrics import Metrics
from rft.setup.assembly import Job
from tests.data.contexts import source_context

TOKENIZER = characters(alphabet="0123456789=")
ENCODER = Encoder(TOKENIZER, "none", None)
ROWS = [{"prompt": f"{n}=", "response": "1" * (1 + n % 7), "chosen": "1", "rejected": "2"} for n in range(23)]


@pytest.fixture
def files(tmp_path):
    """Three files of different sizes and formats."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    paths = [tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.parquet"]
    paths[0].write_text("".join(json.dumps(row) + "\n" for row in ROWS[:11]))
    paths[1].write_text("\n".join(",".join(row) for row in (ROWS[0], *(row.values() for row in ROWS[11:14]))))
    datasets.Dataset.from_list(ROWS[14:]).to_parquet(paths[2])
    return [str(path) for path in paths]


def parts(files, limit=None, required=("prompt",)):
    return FileRows(files, {}, None, limit, "data.train").stream(required)


def drawn(parts, buffer, count, most=None, said=None, shuffle=True):
    filters = [] if most is None else [short_prompts(ENCODER, PromptLimit(most, "drop"))]
    stream = parts.open(buffer, filters, [].append if said is None else said.append)
    sampler = make_sampler(stream, 3, shuffle)
    return [stream[number] for _ in range(count) for _, number in sampler.take(1)], sampler


@pytest.mark.parametrize("buffer", [1, 4, 100])
def test_every_epoch_has_every_row_once_in_an_order_of_its_own(files, buffer):
    rows, sampler = drawn(parts(files), buffer, 3 * len(ROWS))
    epochs = [[int(row["prompt"][:-1]) for row in rows[start : start + 23]] for start in (0, 23, 46)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs) and sampler.position == 69
    assert len({tuple(epoch) for epoch in epochs}) == (1 if buffer == 1 else 3)
    assert (epochs[0] == list(range(23))) == (buffer == 1), "a buffer of one leaves files and rows as they come"
    assert sorted(rows[:23], key=lambda row: int(row["prompt"][:-1])) == ROWS


@pytest.mark.parametrize("buffer", [1, 4, 100])
def test_without_a_shuffle_every_epoch_has_the_order_of_the_files(files, buffer):
    rows, _ = drawn(parts(files), buffer, 2 * len(ROWS), shuffle=False)
    assert rows == 2 * ROWS


def test_a_limit_is_of_the_first_rows_and_of_every_epoch(files):
    rows, _ = drawn(parts(files, limit=13), 4, 26)
    assert sorted(int(row["prompt"][:-1]) for row in rows[:13]) == list(range(13)), "of two files"
    assert {row["prompt"] for row in rows[13:]} == {row["prompt"] for row in rows[:13]}


def test_nothing_is_read_that_is_not_needed(files):
    read = []

    def part(start):
        for number in range(start, 10**9):
            read.append(number)
            yield ROWS[number % 23]

    shards = RowStream([part], "data.train")
    assert len(shards.preview()) == 64 == len(read)
    drawn(shards, 50, 101)
    assert len(read) == 64 + 150


def told(batches):
    """Every row of some batches of one step: its unit, its tokens and those that train."""
    return sorted(
        (unit, ids[mask.bool()].tolist(), trains[mask.bool()].tolist())
        for batch in batches
        for unit, ids, mask, trains in zip(
            batch["unit"].tolist(), *(batch["tokens", name] for name in ("input_ids", "attention_mask")),
            batch["response_mask"], strict=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "shuffle"), [(DatasetSource, 2, True), (DatasetSource, 2, False), (PairSource, 4, True)]
)
def test_a_run_goes_on_with_the_very_rows_on_any_number_of_ranks(files, ranks, kind, size, shuffle):
    options = {DatasetSource: {"response": "response"}}.get(kind, {"chosen": "chosen", "rejected": "rejected"})
    options |= {"margin": None} if kind is PairSource else {}

    def steps(world, states=None):
        filters = [short_prompts(ENCODER, PromptLimit(2, "drop"))]  # of three tokens, 10= to 22=, are dropped
        stream = parts(files).open(5, filters, [].append)
        source = kind(kind.Options(**options), source_context(world, ENCODER, stream, 8, seed=2, shuffle=shuffle))
        if states is not None:
            source.load_state_dict(json.loads(json.dumps(states[0])))
        return [(world.gather(source.state_dict()), source.next(Metrics())) for _ in range(6)]

    [alone] = ranks(1, steps)
    shared = ranks(size, steps)
    for step, (_, whole) in enumerate(alone):
        assert told(theirs[step][1] for theirs in shared) == told([whole])
        assert {int(row["prompt"][:-1]) for row in fields(whole)} <= set(range(10))
    numbers = [int(row["prompt"][:-1]) for _, batch in alone[:3] for row in fields(batch)]
    assert (numbers == [row % 10 for row in range(24)]) is not shuffle
    for begun in range(6):
        [later] = ranks(1, lambda world, begun=begun: steps(world, shared[0][begun][0]))
        for (_, again), (_, first) in zip(later, alone[begun:], strict=False):
            for column in ("unit", "response_mask", ("tokens", "input_ids")):
                assert again[column].numpy().tobytes() == first[column].numpy().tobytes()


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_a_data_set_is_streamed_as_it_is_loaded(tmp_path, monkeypatch, form):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    halves = [datasets.Dataset.from_list(ROWS[:9]), datasets.Dataset.from_list(ROWS[9:])]
    if form == "saved":
        datasets.concatenate_datasets(halves).save_to_disk(folder, num_shards=2)  # which the package has in one
    for number, half in enumerate(halves if form != "saved" else []):
        name = str(folder / f"train-{number}.{form}")
        half.to_parquet(name) if form == "parquet" else half.to_json(name)
    rows = HubRows(str(folder), None, None if form == "saved" else "train", {}, None, None, "data.train")
    shards = rows.stream(["prompt"])
    assert len(shards.shards) == (1 if form == "saved" else 2)
    in_order, _ = drawn(shards, 1, 23)
    assert in_order == list(rows.load(["prompt"])) == ROWS
    assert list(shards.shards[-1](4)) == ROWS[(4 if form == "saved" else 13) :], "a shard is begun in its midst"
    with pytest.raises(ValueError, match=r"set(\[train\])? shard 1 row 1: no field 'answer'"):
        rows.stream(["answer"]).preview()


def test_rows_with_long_prompts_are_counted_as_they_are_dropped(files):
    said = []
    _, sampler = drawn(parts(files), 6, 30, most=2, said=said)  # 10 of 23 rows fit
    assert 3 * 23 - 13 <= sampler.position <= 3 * 23
    assert said[-1].startswith("data.train: ") and said[-1].endswith(
        "rows so far were dropped: their prompts have more tokens than data.max_prompt_tokens=2"
    )
    dropped, seen = (int(word) for word in said[-1].split() if word.isdigit())
    assert sampler.state_dict()["dropped"] == sampler.position - 30 >= dropped and seen <= sampler.position
    with pytest.raises(
        ValueError,
        match=r"data\.train: all rows of an epoch were dropped: their prompts have .* than data\.max_prompt_tokens=1",
    ):
        drawn(parts(files), 6, 1, most=1)


def config_of(config, files, **data):
    node = {"_target_": "rft.data.rows.sources.FileRows", "path": files, "schema": None, "limit": None}
    node["columns"] = {"answer": "response", "demonstration": "chosen"}
    return config | {"data": config["data"] | {"streaming": 5, "train": node} | data}


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_streams_both_stages_and_goes_on_after_its_last_checkpoint(mixed, files, tiny, tmp_path, capsys):
    config = config_of(tiny("steps=2", "checkpoint.every=3", "eval.every=0", "warmup.eval_every=0"), files)
    data = config["data"]
    (tmp_path / "heldout.jsonl").write_text(
        "".join(json.dumps(row | {"prompt": f"{n}+"}) + "\n" for n, row in enumerate(ROWS))
    )
    data |= {"max_prompt_tokens": 2, "eval": {"heldout": data["train"] | {"path": str(tmp_path / "heldout.jsonl")}}}
    if mixed:
        few = data["train"] | {"path": files[0]}
        parts = {"few": {"weight": 1, "rows": few}, "all": {"weight": 2, "rows": data["train"]}}
        data["train"] = {"_target_": "rft.data.rows.mixture.Mixture", "parts": parts}
    Job(config).fit("")
    said = " ".join(capsys.readouterr().out.split())
    assert f"data.train is streamed: only its first {34 if mixed else 23} rows were checked" in said
    assert f"data.train{'.parts.all.rows' if mixed else ''}: " in said and "were dropped" in said
    run = tmp_path / "run"

    def numbers():
        for row in map(json.loads, (run / "metrics.jsonl").open()):
            yield {name: row[name] for name in row if not name.startswith(("time/", "throughput/", "memory/"))}

    whole = list(numbers())
    assert {row["step"] for row in whole} == set(range(5)), "0, two of the warm-up and two of the reinforcement"
    (run / "result.json").unlink()
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").symlink_to("step_00000003")
    Job(config).fit("")
    assert list(numbers()) == whole


def test_what_cannot_be_streamed_is_refused_by_key(files, tiny, tmp_path):
    config = tiny("warmup=none")
    for data, message in (
        ({"streaming": 0}, r"data\.streaming=0: it must be at least 1"),
        ({"train": config["data"]["train"]}, r"data\.streaming: data\.train is a Symbolic, which cannot be streamed"),
        ({"train": {"_target_": "uuid.uuid4"}}, r"data\.streaming: data\.train is a uuid4, which cannot be streamed"),
    ):
        with pytest.raises(ValueError, match=message):
            Job(config_of(config, files) | {"data": config_of(config, files)["data"] | data})
    with pytest.raises(ValueError, match=r"data\.streaming=5: algorithm\.source\.tracking counts"):
        Job(config_of(tiny("warmup=none", "algorithm/source=prioritized", "algorithm/advantage=spo"), files))
    job = Job(config_of(config, files))
    job.load(1)
    [said] = job.check.messages
    assert (
        said.startswith("data.streaming=5: prompts of a stream are not counted")
        and "max_prompt_tokens to 122 or less" in said
    )
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"data\.train\.path: .*d\.json cannot be streamed; write \.jsonl, \.csv, \.par"
    ):
        parts(str(tmp_path / "d.json"))
    with pytest.raises(ValueError, match=r"data\.streaming: this way of drawing rows needs their number"):
        len(RowStream([], "data.train"))
