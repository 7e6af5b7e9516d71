"""`mode=chat`: what is asked, what is remembered, and what is said of what cannot be."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import rft
from rft.modes.chat import chat
from rft.rollout.engine.hf import HFEngine
from tests.conftest import SOON_S

ROOT = Path(rft.__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}add {{ m.content }}"
    "{% else %}={{ m.content }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def talked(config, monkeypatch, tmp_path):
    """Types lines; returns the number of answers, the prompts that the model read, its answers, what was printed."""
    template = tmp_path / "turns.jinja"
    template.write_text(TEMPLATE)
    real = HFEngine.generate

    def run(lines, *overrides):
        prompts, answers = [], []

        def generate(self, requests, sampling, on_completion=None):
            found = real(self, requests, sampling, on_completion)
            prompts.append(self.context.tokenizer.decode(requests[0].prompt))
            answers.append(found[0][0].text)
            return found

        monkeypatch.setattr(HFEngine, "generate", generate)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        console = Console(file=io.StringIO(), width=200)
        count = chat(config("mode=chat", f"data.template={template}", *overrides), console)
        assert count == len(answers)
        return prompts, answers, console.file.getvalue()

    return run


def test_turns_are_remembered_until_they_are_cleared(talked):
    prompts, answers, printed = talked("12\n34\n/clear\n56\n/quit\n78\n")
    assert prompts == ["add 12=", f"add 12={answers[0]}<eos>add 34=", "add 56="]
    assert [answers[0] in printed, answers[2] in printed] == [True, True]
    assert "step_00000003/actor. /clear forgets the conversation" in printed


def test_system_prompts(talked):
    prompts, _, _ = talked("1\n/system sort\n2\n", "data.system=read")
    assert prompts == ["read add 1=", "sort add 2="]
    prompts, answers, _ = talked("/system sort\n2\n3\n/clear\n4\n")
    assert prompts == ["sort add 2=", f"sort add 2={answers[0]}<eos>add 3=", "sort add 4="]


def test_answers_differ_unless_they_are_greedy(talked):
    _, greedy, _ = talked("1\n/clear\n1\n", "chat.greedy=true")
    assert greedy[0] == greedy[1]
    _, drawn, _ = talked("1\n/clear\n" * 6, "rollout.temperature=4")
    assert len(set(drawn)) > 1
    assert drawn == talked("1\n/clear\n" * 6, "rollout.temperature=4")[1], "the seed says which"


def test_without_a_template_every_line_is_completed_by_itself(talked):
    prompts, _, printed = talked("add 12=\n/clear\n/quit\n", "data.template=none")
    assert prompts == ["add 12=", "<unk><unk>lear"]
    assert "completes text. /quit ends" in printed


def test_what_cannot_be_asked_is_said_and_forgotten(talked):
    prompts, answers, printed = talked(f"1\n\n/quiet\n{'7' * 130}\n2\n")
    assert prompts == ["add 1=", f"add 1={answers[0]}<eos>add 2="]
    assert printed.count("/clear forgets the conversation") == 3
    assert "are over the model's context of 128; /clear, or shorten it" in printed


def test_a_template_that_refuses(talked, tmp_path):
    (tmp_path / "picky.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + TEMPLATE
    )
    prompts, _, printed = talked("/system sort\n1\n", f"data.template={tmp_path / 'picky.jinja'}")
    assert prompts == [] and "the prompt cannot be encoded: " in printed and "no system message" in printed


def test_an_answer_that_was_cut_is_told(talked):
    _, _, printed = talked("1\n" * 3, "rollout.max_new_tokens=1", "rollout.temperature=9")
    assert "(cut at rollout.max_new_tokens=1)" in printed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.template=chat"], "data.template=chat: the tokenizer has no chat template"),
        (["chat.checkpoint=9"], "chat.checkpoint=9: "),
        (["data.template=none", "data.system=sort"], "data.system has no effect with data.template=none"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(overrides, message, talked, unloaded):
    with pytest.raises(ValueError, match=message):
        talked("1\n", *overrides)


@pytest.mark.slow
def test_at_a_terminal(finished, tmp_path):
    """The command itself in a pseudo-terminal, ended by the end of the input."""
    command = [sys.executable, "-m", "rft.main", *finished[0], "mode=chat", "chat.greedy=true"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    for line in (b"add 12=\n", b"add 34=\n", b"\x04"):
        while not shown.endswith(b"> ") and not shown.endswith(b"> \x1b[0m"):
            shown += os.read(ours, 4096)
        os.write(ours, line)
        shown += b"|"
    assert process.wait(SOON_S) == 0
    text = shown.decode()
    assert "completes text. /quit ends" in text and text.count("add 12=") == 1 and text.count("add 34=") == 1
