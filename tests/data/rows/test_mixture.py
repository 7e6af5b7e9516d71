"""Mixtures: exact shares, parts that repeat, and the same order on any number of ranks and after any stop."""

import json
from collections import Counter

import pytest
import torch

from rft.batch.collate import collate
from rft.batch.columns import fields
from rft.data.encode.encoder import Encoder
from rft.data.encode.stream_limits import short_prompts
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import PromptLimit
from rft.data.given.supervised import DatasetSource
from rft.data.rows.lazy import Rows
from rft.data.rows.mixture import Mixed, Mixture, MixturePart, MixtureSampler
from rft.data.sampler import RowSampler, make_sampler
from rft.errors import Problems
from rft.metrics import Metrics
from rft.setup.assembly import Job
from rft.train.trainer import sampled_texts
from tests.data.contexts import source_context

TOKENIZER = characters(alphabet="0123456789=")
SIZES = {"a": 10, "b": 3, "c": 50, "d": 10}


def mixed(weights: dict[str, float], sizes: dict[str, int] = SIZES) -> Mixed:
    parts: dict[str, Rows] = {
        name: [{"prompt": f"{n}=", "response": str(n), "n": n, "part": name} for n in range(sizes[name])]
        for name in weights
    }
    return Mixed(parts, weights)


def drawn(rows: Mixed, count: int, seed: int = 0) -> list[str]:
    return [rows[row]["part"] for _, row in MixtureSampler(rows, seed).take(count)]


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ({"a": 3, "b": 1}, {"a": 0.75, "b": 0.25}),
        ({"a": 0.75, "b": 0.25}, {"a": 0.75, "b": 0.25}),
        ({"a": 1, "b": 1, "c": 2}, {"a": 0.25, "b": 0.25, "c": 0.5}),
        ({"c": 19, "a": 1}, {"c": 0.95, "a": 0.05}),
    ],
)
def test_shares_are_exact_whatever_the_sizes(weights, share):
    for count in (20, 400):
        assert Counter(drawn(mixed(weights), count)) == {name: part * count for name, part in share.items()}


def test_shares_that_do_not_come_out_even_are_never_far_off():
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    parts = drawn(mixed(weights), 1000)
    for count in range(10, 1001, 10):  # of the least share one in ten: a round
        found = Counter(parts[:count])
        assert all(abs(found[name] - count * weight) <= 1 for name, weight in weights.items()), count
    weights = {"a": 2, "b": 1}
    assert all(abs(drawn(mixed(weights), 3 * n).count("b") - n) < 1 for n in range(1, 40))


def test_every_part_is_walked_through_in_epochs_of_its_own():
    rows = mixed({"a": 3, "b": 1})
    found = [rows[row] for _, row in MixtureSampler(rows, 0).take(120)]
    for name, size in (("a", 10), ("b", 3)):
        numbers = [row["n"] for row in found if row["part"] == name]
        epochs = [tuple(numbers[start : start + size]) for start in range(0, len(numbers) - size + 1, size)]
        assert len(epochs) >= 9 and all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) > 3


def test_parts_of_one_size_and_their_turns_are_shuffled_apart():
    rows = mixed({"a": 1, "b": 1}, {"a": 30, "b": 30})
    found = [rows[row] for _, row in MixtureSampler(rows, 0).take(60)]
    orders = [[row["n"] for row in found if row["part"] == name] for name in ("a", "b")]
    assert orders[0] != orders[1]
    turns = "".join(row["part"] for row in found)
    assert "ab" * 30 != turns != "ba" * 30


@pytest.mark.parametrize("position", [0, 1, 3, 4, 17, 95])
def test_a_sampler_continues_anywhere(position):
    rows = mixed({"a": 0.7, "b": 0.3})
    whole, later = MixtureSampler(rows, 3), MixtureSampler(rows, 3)
    whole.take(position)
    later.position = position
    assert later.take(40) == whole.take(40)
    assert MixtureSampler(rows, 4).take(40) != MixtureSampler(rows, 3).take(40)


def test_rows_without_weight_are_passed_over():
    rows = mixed({"a": 1, "b": 1})
    weights = torch.ones(len(rows))
    weights[10:12] = 0.0
    plain = MixtureSampler(rows, 0).take(60)
    assert MixtureSampler(rows, 0).take(40, weights) == [pair for pair in plain if pair[1] not in (10, 11)][:40]


def test_rows_say_which_part_they_came_from():
    parts = {"a": [{"n": 1}, {"n": 2, "data_source": "own"}], "b": [{"n": 3, "data_source": None}]}
    rows = Mixed(parts, {"a": 1.0, "b": 1.0})
    assert [row["data_source"] for row in rows] == ["a", "own", "b"]
    assert len(rows) == 3 and rows[-1]["n"] == 3
    assert "data_source" not in parts["a"][0]


def test_sampled_texts_say_it_too():
    rows = Mixed({"a": [{"prompt": "1="}], "b": [{"prompt": "2="}]}, {"a": 1.0, "b": 1.0})
    values = {"scores": torch.tensor(0.5), "terms": {"exact_match": torch.tensor(0.5)}}
    batch = collate([values | {"fields": row | {"text": "x"}} for row in [*rows, {"prompt": "3="}]])
    one, two, three = sampled_texts(batch, 3)
    assert one == {"set": "train", "prompt": "1=", "response": "x", "score": 0.5, "data_source": "a"}
    assert two["data_source"] == "b" and "data_source" not in three


def test_sampled_texts_have_the_terms_of_a_reward_of_several():
    terms = {"exact_match": torch.tensor(0.0), "format": torch.tensor(0.5)}
    batch = collate([{"scores": torch.tensor(0.1), "terms": terms, "fields": {"prompt": "1=", "text": "x"}}])
    [text] = sampled_texts(batch, 3)
    assert text["score"] == pytest.approx(0.1) and (text["reward/exact_match"], text["reward/format"]) == (0.0, 0.5)


def test_plain_rows_are_drawn_as_before():
    assert type(make_sampler([{}, {}], 0, True)) is RowSampler
    assert type(make_sampler(mixed({"a": 1}), 0, True)) is MixtureSampler


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_what_one_draws_and_go_on_on_another_number(size, ranks):
    rows = mixed({"a": 3, "b": 1})

    def steps(world, states=None):
        encoder = Encoder(TOKENIZER, "none", None, None, "response")
        source = DatasetSource(DatasetSource.Options(response="response"), source_context(world, encoder, rows, 8, 2))
        if states:
            source.load_state_dict(states[0])
        found = []
        for step in range(4):
            if step == 2:
                states = world.gather(source.state_dict())
            batch = source.next(Metrics())
            found += zip(batch["unit"].tolist(), (row["n"] for row in fields(batch)), strict=True)
        return found, states

    [(alone, _)] = ranks(1, steps)
    shared = ranks(size, steps)
    assert sorted(pair for found, _ in shared for pair in found) == alone
    [(later, _)] = ranks(1, lambda world: steps(world, shared[0][1]))
    assert later[:16] == alone[16:]


@pytest.fixture
def streamed(tmp_path):
    """Opens a mixture of files with `SIZES` rows, each read in blocks of 4."""
    nodes = files(tmp_path, **SIZES)

    def opened(weights, most=None, say=str):
        """`most`: the tokens of a prompt; rows with longer ones are dropped."""
        parts = {name: MixturePart(weight, nodes[name]["rows"]) for name, weight in weights.items()}
        encoder = Encoder(TOKENIZER, "none", None, None, "response")
        filters = [] if most is None else [short_prompts(encoder, PromptLimit(most, "drop"))]
        return Mixture(parts, "data.train").stream(["prompt"]).open(4, filters, say)

    return opened


def test_streams_have_the_turns_of_rows_that_are_known_and_epochs_of_their_own(streamed):
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    stream = streamed(weights)
    walk, found = make_sampler(stream, 3, True), []
    for count in (1, 7, 30, 162):
        found += [stream[number] for _, number in walk.take(count)]
    assert [row["data_source"] for row in found] == drawn(mixed(weights), 200, seed=3)
    for name in weights:
        numbers, size = [int(row["prompt"]) for row in found if row["data_source"] == name], SIZES[name]
        epochs = [tuple(numbers[start : start + size]) for start in range(0, len(numbers) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs), "every row once"
        assert len(epochs) == len(numbers) // size and (name == "c" or len(set(epochs)) > 3)


def test_without_a_shuffle_each_round_has_its_parts_and_each_part_its_rows_in_their_order(streamed):
    weights = {"b": 0.25, "a": 0.75}  # a round of four draws: the 3 rows of b repeat after three rounds
    expected = ["b0", "a0", "a1", "a2", "b1", "a3", "a4", "a5", "b2", "a6", "a7", "a8", "b0", "a9", "a0", "a1"]
    known, stream = mixed(weights), streamed(weights)
    rows = [known[number] for _, number in make_sampler(known, 3, False).take(16)]
    assert [f"{row['part']}{row['n']}" for row in rows] == expected
    rows = [stream[number] for _, number in make_sampler(stream, 3, False).take(16)]
    assert [row["data_source"] + row["prompt"] for row in rows] == expected


def test_streams_of_one_size_are_shuffled_apart(streamed):
    stream = streamed({"a": 1, "d": 1})
    found = [stream[number] for _, number in make_sampler(stream, 0, True).take(20)]
    orders = [[row["prompt"] for row in found if row["data_source"] == name] for name in ("a", "d")]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_rows_that_a_stream_drops_take_no_turn(streamed):
    said = []
    stream = streamed({"b": 1, "c": 3}, most=1, say=said.append)
    found = [stream[number] for _, number in make_sampler(stream, 0, True).take(80)]
    assert Counter(row["data_source"] for row in found) == {"b": 20, "c": 60}
    assert {row["prompt"] for row in found if row["data_source"] == "c"} == set("0123456789")
    assert said and all(line.startswith("data.train.parts.c.rows: ") for line in said), "every prompt of b is short"
    with pytest.raises(ValueError, match=r"data\.train\.parts\.[bc]\.rows: all rows of an epoch were dropped: .*=0"):
        make_sampler(streamed({"b": 1, "c": 3}, most=0), 0, True).take(1)


@pytest.mark.parametrize("size", [2, 4])
def test_streams_go_on_with_the_very_rows_on_any_number_of_ranks(size, ranks, streamed):
    def steps(world, states=None):
        encoder = Encoder(TOKENIZER, "none", None, None, "response")
        rows = streamed({"a": 3, "c": 2}, most=1)
        source = DatasetSource(DatasetSource.Options(response="answer"), source_context(world, encoder, rows, 8, 2))
        if states:
            source.load_state_dict(json.loads(json.dumps(states[0])))
        return [(world.gather(source.state_dict()), told(source.next(Metrics()))) for _ in range(5)]

    [alone] = ranks(1, steps)
    shared = ranks(size, steps)
    for step in range(5):
        assert sorted(row for theirs in shared for row in theirs[step][1]) == alone[step][1]
        [later] = ranks(1, lambda world, step=step: steps(world, shared[0][step][0]))
        assert [rows for _, rows in later[: 5 - step]] == [rows for _, rows in alone[step:]]


def told(batch):
    rows = zip(batch["unit"].tolist(), fields(batch), strict=True)
    return [(unit, row["data_source"], row["prompt"]) for unit, row in rows]


def test_parts_that_cannot_be_streamed_are_refused(tmp_path):
    parts = {name: MixturePart(1.0, node["rows"]) for name, node in files(tmp_path, x=3).items()}
    symbols = {"_target_": "rft.data.rows.symbolic.Symbolic", "task": "add", "split": "train", "count": 4}
    symbols |= {"length": [4, 4], "slips": 0.0, "seed": 0}
    whole = Mixture(parts | {"y": MixturePart(1.0, symbols)}, "data.train")
    with pytest.raises(ValueError, match=r"^data\.streaming: data\.train\.parts\.y\.rows is a Symbolic, which"):
        whole.stream(["prompt"])
    inner = {"_target_": "rft.data.rows.mixture.Mixture", "parts": files(tmp_path, x=3)}
    with pytest.raises(ValueError, match=r"data\.train\.parts\.z\.rows: the weights of a mixture inside a mixture"):
        Mixture(parts | {"z": MixturePart(1.0, inner)}, "data.train")


def files(tmp_path, **counts):
    for name, count in counts.items():
        (tmp_path / f"{name}.csv").write_text("prompt,answer\n" + "".join(f"{n},{n}\n" for n in range(count)))
    node = {"_target_": "rft.data.rows.sources.FileRows", "columns": {}, "schema": None, "limit": None}
    return {name: {"weight": 1.0, "rows": node | {"path": str(tmp_path / f"{name}.csv")}} for name in counts}


def test_a_node_with_parts_is_loaded(tmp_path, resolved):
    config = resolved("warmup=none")
    config["data"]["train"] = {"_target_": "rft.data.rows.mixture.Mixture", "parts": files(tmp_path, x=3, y=2)}
    job = Job(config)
    loaded = job.load(1)
    job.check.end()
    assert [(row["answer"], row["data_source"]) for row in loaded.train] == [
        ("0", "x"), ("1", "x"), ("2", "x"), ("0", "y"), ("1", "y"),
    ]  # fmt: skip
    config["data"]["train"]["parts"]["y"]["rows"]["columns"] = {"answer": "anwser"}
    job = Job(config)
    with pytest.raises(Problems) as caught:
        job.load(1)
    assert "y.csv line 2: no field 'anwser'" in caught.value.messages[0]
    assert "set data.train.parts.y.rows.columns.answer to its name" in caught.value.messages[0]


def test_what_is_wrong_with_parts_names_them(tmp_path):
    for parts, message in (
        ({}, r"data\.train\.parts is empty"),
        ({"x": MixturePart(1.0, {})}, r"data\.train\.parts\.x\.rows: expected a class"),
    ):
        with pytest.raises(ValueError, match=message):
            Mixture(parts, "data.train")


def test_weights_that_nothing_would_look_at_are_refused(tmp_path, resolved):
    mixture = {"_target_": "rft.data.rows.mixture.Mixture", "parts": files(tmp_path, x=3)}
    config = resolved()
    config["data"]["eval"]["heldout"] = mixture
    with pytest.raises(ValueError, match=r"data\.eval\.heldout: an evaluation uses all rows of a set"):
        Job(config)
    config = resolved("algorithm/source=prioritized", "algorithm/advantage=spo")
    config["data"]["train"] = mixture
    with pytest.raises(ValueError, match=r"data\.train is a mixture, and algorithm\.source\.priority"):
        Job(config)
