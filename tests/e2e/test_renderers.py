"""Runs whose dialogues continue by a renderer of the package `renderers`."""

import json
import string

import pytest

pytest.importorskip("renderers")

from rft.data.encode.tokenizer import characters_and_tokens
from rft.rollout.environment.renderers import PackageRenderer
from rft.setup.assembly import Job
from tests.data import chat_texts as chats
from tests.e2e.test_episodes import Ones
from tests.helpers import numbers

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
           "</tool_response>", "<think>", "</think>"]  # fmt: skip
RUN = (
    *("environment=guessing", "~environment.classes.guessing", "environment.renderer=qwen3", "data=questions"),
    f"+environment.classes.ones._target_={Ones.__module__}.Ones",
    *("+data.template_arguments.enable_thinking=false", "actor/tokenizer=pretrained", "strategy.device=cpu"),
    "actor.model_config.max_position_embeddings=512",
    *("steps=2", "batch.prompts=4", "algorithm.group_size=4", "reward=environment", "warmup=none", "eval.every=0"),
    *("rollout.max_new_tokens=16", "data.max_prompt_tokens=512", "eval.at_start=false", "trajectories.every=1"),
    *("metric=eval/questions/accuracy", f"rollout.stop=[{','.join(string.ascii_lowercase)}]"),  # most answers end soon
)


@pytest.fixture
def fit(resolved, tmp_path):
    """Runs with a tokenizer of Qwen3's special tokens and a template; returns the numbers of the steps."""

    def run(template, *overrides):
        tokenizer = characters_and_tokens(alphabet=string.printable, special=SPECIAL)
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        (tmp_path / "template.jinja").write_text(template)
        for name, first in (("rows", 0), ("held_out", 8)):
            rows = [{"prompt": f"{first + n} ", "answer": ""} for n in range(8)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = resolved(
            *RUN, *overrides, f"output_dir={tmp_path / 'run'}", f"actor.tokenizer.path={tmp_path / 'tokenizer'}",
            f"data.template={tmp_path / 'template.jinja'}", f"data.train.path={tmp_path / 'rows.jsonl'}",
            f"data.eval.questions.path={tmp_path / 'held_out.jsonl'}",
        )  # fmt: skip
        Job(config).fit("")
        return numbers(tmp_path / "run")

    return run


@pytest.mark.usefixtures("one_thread")
def test_two_steps_continue_by_the_renderer(fit, monkeypatch):
    found, original = [], PackageRenderer.suffix
    monkeypatch.setattr(PackageRenderer, "suffix", lambda *given: found.append(original(*given)) or found[-1])
    steps = fit(chats.QWEN3)
    last = steps[-1]
    assert last["episode/turns"] > 1 and last["episode/failed"] == 0 == last["episode/forks"]
    assert last["grad_norm"] > 0
    assert sum(one is not None for one in found) > 48, "of 64 answers, where no token of a thought was sampled"
    assert max(row.get("rollout/logprob_gap_max", 0) for row in steps) < 1e-5, "the row has the tokens of the engine"


def test_the_renderer_of_another_template_ends_the_run_before_a_model_is_loaded(fit, monkeypatch):
    monkeypatch.setattr(Job, "train_in", lambda *_: pytest.fail("it loads the models"))
    with pytest.raises(ValueError, match=r"environment\.renderer=qwen3 is no renderer of data\.template="):
        fit(chats.QWEN3.replace("<tool_response>", "<tool_response> "))
