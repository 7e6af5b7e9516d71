"""A teacher behind servers: its columns whatever the servers do, and runs that learn from it."""

import json
import time

import pytest
import torch

from rft.actor.base import ModelContext
from rft.data.encode.tokenizer import characters
from rft.distributed import start, stop
from rft.errors import Problems
from rft.modes.plan.job import PlanJob
from rft.rollout.server.teacher import ServedTeacher
from rft.rollout.server.teacher_options import ServedTeacherOptions
from rft.setup.assembly import Job
from tests.conftest import SOON_S
from tests.helpers import token_batch, yaml_options
from tests.rollout.media import MEDIA
from tests.rollout.server.fake_teacher import ASK, FakeTeacher, distributions

WORDS = characters(**yaml_options("actor/tokenizer/characters.yaml"))
KNOWN, TOP = len(WORDS), 6
ALL = ("logprobs", "top_ids", "top_logprobs")
FAULTS = ["drop", "lose", "late", "garbage", "no http", "cut", "corrupt", 503, 500, "never", "fewer", "logits", "short"]


@pytest.fixture
def taught():
    """Starts fake teachers with more tokens than the policy has."""
    started = []

    def more(kind="vllm", count=1, **options):
        found = [FakeTeacher(kind, WORDS, **{"vocabulary": KNOWN + 3} | options) for _ in range(count)]
        started.extend(found)
        return found

    yield more
    for fake in started:
        fake.kill()


def options(servers, **changes):
    """Of the yaml, with short deadlines."""
    waits = {"start_s": 10.0, "answer_s": 10.0, "poll_s": 0.02, "top_k": TOP}
    addresses = [server.address for server in servers]
    return ServedTeacherOptions(
        **yaml_options("teacher/teacher_server.yaml", **{"addresses": addresses} | waits | changes)
    )


def teacher(servers, **changes):
    return ServedTeacher(ModelContext("teacher", start("cpu"), None, WORDS, 0), options(servers, **changes))


def batch(rows=range(6)):
    """Rows of several lengths, of which some tokens train: of the fourth none; the last is as the first."""
    made: list[torch.Tensor] = []
    keeps = []
    for row in rows:
        ids = torch.randint(0, KNOWN, (6 + row % 5,), generator=torch.Generator().manual_seed(row % 5))
        keep = torch.arange(len(ids)) % 3 != row % 5 % 3
        keep[: 1 + row % 5] = False
        made.append(ids)
        keeps.append(keep & (row != 3))
    return token_batch(*made, loss_mask=keeps, group=[row // 2 for row in rows])


def right(asked, seed=0):
    """The columns of a batch by its distributions, computed here."""
    keep = asked["loss_mask"]
    found = {"logprobs": torch.zeros(keep.shape), "top_logprobs": torch.zeros(*keep.shape, TOP)}
    found["top_ids"] = torch.zeros(*keep.shape, TOP, dtype=torch.int32)
    for row, place in keep.nonzero().tolist():
        tokens = asked["tokens", "input_ids"][row, : place + 1].tolist()
        logprobs = distributions(tokens, KNOWN + 3, seed)[-1]
        found["logprobs"][row, place] = logprobs[tokens[-1]]
        found["top_logprobs"][row, place], found["top_ids"][row, place] = logprobs[:KNOWN].topk(TOP)
    return found


def same(found, expected):
    for name, column in found.items():
        assert column.dtype == expected[name].dtype
        torch.testing.assert_close(column, expected[name])


@pytest.mark.parametrize("kind", ASK)
def test_the_columns_are_those_of_the_distributions_of_the_tokens_that_the_policy_has(kind, taught):
    servers, asked = taught(kind, 2), batch()
    served = teacher(servers)
    same(served.compute(asked, ALL, 1.0), right(asked))
    first = [number for server in servers for (tokens, number) in server.asked.elements() if number == TOP]
    assert len(first) == 4, "not of a row of which nothing trains, and once of two that are the same"
    assert {number for server in servers for (_, number) in server.asked} == {TOP, 2 * TOP}, "more where it has to be"
    for server in servers:
        server.asked.clear()
    for rows in ([4], [2, 1, 0], [3]):
        same(served.compute(batch(rows), ALL, 1.0), right(batch(rows)))
    assert min(number for server in servers for (_, number) in server.asked) > TOP, "it has learnt that it has to be"
    for server in servers:
        server.asked.clear()
    same(served.compute(asked, ("logprobs",), 1.0), right(asked))
    assert {number for server in servers for (_, number) in server.asked} == {0}
    assert all(server.asked for server in servers), "both work"


def test_placeholders_of_media_are_none_of_the_likeliest(taught):
    """The policy gives them no probability, so a divergence from the teacher would be as large as their bias."""
    context, asked = ModelContext("teacher", start("cpu"), None, WORDS, 0, media=MEDIA), batch()
    found = ServedTeacher(context, options(taught(vocabulary=KNOWN), top_k=KNOWN)).compute(asked, ALL, 1.0)
    keep = asked["loss_mask"]
    assert set(found["top_ids"][keep].flatten().tolist()) == set(range(KNOWN)) - set(MEDIA.placeholders)
    assert found["top_ids"].shape[-1] == KNOWN - 2


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.slow] if fault == "never" else []) for fault in FAULTS]
)
def test_the_columns_come_where_a_server_fails_now_and_then(fault, taught):
    kind = "sglang" if fault in FAULTS[::2] else "vllm"
    servers, asked = taught(kind, 2), batch()
    served = teacher(servers, answer_s=1.0 if fault == "never" else SOON_S)
    servers[0].faults[ASK[kind]] = [fault, None, fault]
    servers[1].faults[ASK[kind]] = [None, fault]
    same(served.compute(asked, ALL, 1.0), right(asked))


@pytest.mark.parametrize("fault", ["drop", "garbage", 503, 400, "never", "fewer"])
def test_a_server_that_always_fails_is_named_within_a_deadline(fault, taught):
    [server] = taught()
    server.always[ASK["vllm"]] = fault
    begun = time.monotonic()
    with pytest.raises(OSError, match=rf"rank 0 gives up on \d texts after 2 failures \(teacher\.retries=1\); .*"
                       rf"teacher 0 \({server.address}\)"):  # fmt: skip
        teacher([server], answer_s=0.3, retries=1).compute(batch(), ALL, 1.0)
    assert time.monotonic() - begun < SOON_S


def test_a_wait_for_servers_that_are_gone_ends_with_their_names(taught):
    servers = taught(count=2)
    for server in servers:
        server.kill()
    waits = "rank 0 waits for a server that is up "
    with pytest.raises(TimeoutError, match=rf"{waits}\(teacher 0 \({servers[0].address}\).*teacher 1 .*, 0.1 s"):
        teacher(servers, start_s=0.1).compute(batch(), ALL, 1.0)


def test_a_model_that_finds_tokens_likely_which_the_policy_has_not_is_no_teacher(taught):
    with pytest.raises(
        ValueError, match=rf"^teacher\.top_k=6: of the 12 most likely tokens .* {KNOWN} of actor\.tokenizer; "
    ):
        teacher(taught(vocabulary=KNOWN + 200)).compute(batch(), ALL, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": ["here"]}, r"teacher\.addresses: 'here' is not an address; expected host:port"),
        ({"addresses": ["a:1", "a:1"]}, r"teacher\.addresses=.*is repeated"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=rf"^{message}"):
        options([], **{"addresses": ["a:1"]} | changes).check("teacher", WORDS, 1.0)


def test_what_cannot_be_asked_is_refused_before_a_model_is_loaded(tiny):
    job = Job(tiny("algorithm=on_policy_distill", "teacher=teacher_server", "rollout.temperature=0.7"))
    job.load(1)
    with pytest.raises(Problems) as found:
        job.check.end()
    nobody, temperature = found.value.messages
    assert nobody.startswith("teacher.addresses=[]: there is no server to learn from; give host:port")
    assert temperature.startswith("rollout.temperature=0.7: servers compute log-probabilities at temperature 1 alone;")
    with pytest.raises(Problems, match=r"^reference\._target_: ServedTeacher is a remote model, which only teacher"):
        config = tiny("teacher=teacher_server")
        Job(config | {"reference": config["teacher"]})


def test_a_plan_counts_no_memory_for_it_and_asks_nobody(tiny):
    stop()
    served = ("teacher=teacher_server", "teacher.addresses=[nobody:1]", "teacher.start_s=0.1")
    memory = PlanJob(tiny("algorithm=distill", *served, "plan.prompt_tokens=6"), 1).forecast().memory
    assert "other models" not in memory["columns"] and memory["columns"]["batch"] > 0


def test_a_run_learns_from_it(tiny, taught, tmp_path):
    servers = taught(count=2, vocabulary=KNOWN)
    addresses = json.dumps([server.address for server in servers])
    run = ("algorithm=on_policy_distill", "algorithm/terms=[reverse_kl]", "teacher=teacher_server")
    run += (f"teacher.addresses={addresses}", "teacher.top_k=6", "steps=1")
    servers[1].context = 19
    job = Job(tiny(*run))
    with pytest.raises(Problems, match=r"teacher 1 .* has a context of 19 tokens, and rows may have 19; start it"):
        job.prepare(job.join())
    servers[1].context = 20
    Job(tiny(*run)).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["kl/teacher"] > 0.1 and rows[-1]["loss/reverse_kl"] > 0.1 and rows[-1]["time/annotate_s"] > 0
    for server in servers:
        assert server.asked.pop((tuple(range(16)), 12)) == 2, "before each run"
        assert {number for (_, number) in server.asked} == {6}
