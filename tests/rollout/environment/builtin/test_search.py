import asyncio
import json
import math

import pytest

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.rollout.environment.builtin import search
from rft.rollout.environment.builtin.search import Search, build_index
from rft.rollout.environment.contract import environment_class
from rft.rollout.environment.instance import Processes
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.scripted import ALPHABET, OPTIONS, TEMPLATE, play

TARGET = f"{search.__name__}.Search"
COLORS = ("red red blue", "red green", "blue")  # lengths 3, 2 and 1, of which the mean is 2


def corpus(folder, *documents):
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def node(path, **options):
    default = {"text": "text", "title": None, "k1": 1.2, "b": 0.75}
    return {"search": {"_target_": TARGET, "corpus": path, **default, **options}}


def test_scores_are_those_of_the_formula(tmp_path):
    index = build_index(corpus(tmp_path, *({"text": text} for text in COLORS)), "text", None, 1.2, 0.75)
    assert list(index.norms) == pytest.approx([1.2 * (0.25 + 0.75 * 1.5), 1.2, 1.2 * (0.25 + 0.75 * 0.5)])
    both, one = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)  # of a word in 2 and in 1 of 3 documents
    assert index.best("red", 9) == [(0, pytest.approx(both * 2 / 3.65)), (1, pytest.approx(both / 2.2))]
    assert index.best("Green, blue BLUE!", 2) == [(1, pytest.approx(one / 2.2)), (2, pytest.approx(both / 1.75))]
    assert index.best("yellow", 3) == [] == index.best("", 3)


def test_k1_and_b_of_0_count_neither_repetitions_nor_lengths(tmp_path):
    index = build_index(corpus(tmp_path, *({"text": text} for text in COLORS)), "text", None, 0.0, 0.0)
    assert index.best("red", 3) == [(0, pytest.approx(math.log(1.6))), (1, pytest.approx(math.log(1.6)))]


def test_the_model_calls_it_and_reads_documents_with_titles(tmp_path):
    documents = [{"body": text, "head": f"No. {number}"} for number, text in enumerate(COLORS)]
    classes = node(corpus(tmp_path, *documents), text="body", title="head")

    def write(text):
        if "=" in text:
            return "done"
        arguments = json.loads(text.partition("] ")[2])
        return f"<tool_call>{json.dumps({'name': 'search', 'arguments': arguments})}</tool_call>"

    asked = [{"query": "red 1", "count": 2}, {"query": "green"}, {"query": "x"}, {"query": "red", "count": "2"}]
    found, _ = play(write, classes, [{"prompt": json.dumps(arguments)} for arguments in asked])
    read = [group[0].episode["messages"][2]["content"] for group in found]
    assert read[:3] == [
        "[1] No. 1\nred green\n\n[2] No. 0\nred red blue",
        "[1] No. 1\nred green",
        "No document has a word of the query.",
    ]
    assert "count a whole number from 1 to 100" in read[3] and found[3][0].episode["tool_failures"] == 1


def test_objects_of_a_process_share_the_index(tmp_path):
    options = node(corpus(tmp_path, {"text": "red"}))["search"]
    assert environment_class(options, "key").tools.keys() == {"search"}
    del options["_target_"]
    assert Search(**options)._index is Search(**options)._index
    assert Search(**options)._index is not Search(**options | {"b": 0.5})._index


def test_processes_of_episodes_have_the_index_of_their_server(tmp_path):
    """The file is gone when the second one is forked, so that no process can read it again."""
    path = corpus(tmp_path, {"text": "red"})
    processes = Processes(node(path))
    limits = {"deadline_s": 10.0, "most": 100}

    async def use():
        instance = processes.fork("search")
        await instance.call("reset", **limits)
        assert await instance.call("search", query="red", **limits) == "[1] red"
        instance.end()

    try:
        asyncio.run(use())
        (tmp_path / "corpus.jsonl").unlink()
        asyncio.run(use())
    finally:
        processes.close()


@pytest.mark.parametrize("workers", ["inline", "process"])
@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (None, {}, "corpus={}: there is no such file"),
        ("", {}, "corpus={}: the file has no words"),
        ('{"text": "a"}\n{"body": "b"}\n', {}, "{} line 2: no field 'text' (known: body); set text to the name"),
        ('{"text": "a"}\n', {"title": "head"}, "{} line 1: no field 'head' (known: text); set title to the name"),
        ('{"text": 7}\n', {}, "{} line 1: the field 'text' is no text"),
        ("{", {}, "{} line 1: "),
    ],
)
def test_a_corpus_that_cannot_be_read_is_an_error_before_a_model_is_loaded(lines, options, message, workers, tmp_path):
    path = tmp_path / "corpus.jsonl"
    if lines is not None:
        path.write_text(lines)
    made = Environments.of(EnvironmentOptions(classes=node(str(path), **options), **{**OPTIONS, "workers": workers}))
    with pytest.raises(ValueError) as found:
        made.check(Encoder(characters(alphabet=ALPHABET), TEMPLATE, None))
    assert str(found.value).startswith("environment.classes.search: " + message.format(path))
