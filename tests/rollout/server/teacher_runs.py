"""What tests of real servers share that are teachers: they say what a teacher in the process says."""

import json

import pytest
import torch

from rft.actor.base import ModelContext
from rft.actor.teacher import Teacher, TeacherOptions
from rft.batch.collate import collate
from rft.distributed import start
from rft.rollout.server.teacher import ServedTeacher
from rft.rollout.server.teacher_options import ServedTeacherOptions
from rft.setup.assembly import Job
from tests.helpers import make_strategy, yaml_options
from tests.rollout.server.real_servers import TOKEN

TOP = 8
SERVED = ("teacher=teacher_server", f"teacher.top_k={TOP}")


def texts(vocabulary, rows=12):
    """Rows of several lengths with a prompt in common, of which some tokens train."""
    torch.manual_seed(0)
    made = []
    for row in range(rows):
        ids = torch.randint(0, vocabulary, (40 + 3 * row,))
        ids[:6], ids[-1] = torch.arange(6), vocabulary - 1
        keep = (torch.rand(len(ids)) < 0.7) & (torch.arange(len(ids)) >= 6)
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        made.append({"tokens": tokens, "response_mask": keep, "loss_mask": keep, "group": row // 4, "unit": row})
    return collate(made)


def check_columns(addresses, folder, tokenizer):
    """Servers of the model in a folder tell what it says here."""
    world = start("cpu")
    there = yaml_options("teacher/teacher_server.yaml", addresses=addresses, token=TOKEN, top_k=TOP)
    options = ServedTeacherOptions(**there)
    options.check_here(world, tokenizer, lambda: 100)
    context = ModelContext("teacher", world, make_strategy(world), tokenizer, 0)
    served = ServedTeacher(context, options)
    rows = {"packing": True, "share_prefix": False, "liger": False, "micro_batch_tokens": 512}
    here = yaml_options(
        "teacher/teacher.yaml", path=str(folder), model_config=None, trust_remote_code=False, top_k=TOP, **rows
    )
    batch, outputs = texts(len(tokenizer)), ("logprobs", "top_ids", "top_logprobs")
    expected = Teacher(context, TeacherOptions(**here)).compute(batch, outputs, 1.0)
    found = served.compute(batch, outputs, 1.0)
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4)
    assert torch.equal(found["top_ids"], expected["top_ids"])


def check_runs(addresses, model, tiny, tmp_path, *runs):
    """Runs learn from servers what they learn from the model in a folder."""
    words = "actor.tokenizer.alphabet='0123456789abcdefghijklmnop '"
    teachers = {
        "there": (*SERVED, f"teacher.addresses={json.dumps(addresses)}", f"teacher.token={TOKEN}"),
        "here": (f"teacher.path={model}", "teacher.model_config=null", f"teacher.top_k={TOP}"),
    }
    for number, run in enumerate(runs):
        folders = [tmp_path / f"{number}-{place}" for place in teachers]
        for folder, teacher in zip(folders, teachers.values(), strict=True):
            Job(tiny(*run, words, *teacher, f"output_dir={folder}")).fit("")
        there, here = map(losses, folders)
        assert there.keys() == here.keys() and len(here) > 1
        assert there == {key: pytest.approx(number, abs=1e-4) for key, number in here.items()}


def losses(folder):
    """Losses and divergences of a run, by their step and name."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], name): row[name] for row in rows for name in row if name.startswith(("loss/", "kl/"))}
