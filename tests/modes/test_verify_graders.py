"""`mode=verify`: the certificate of the reward, printed."""

import io
import json

import pytest
from rich.console import Console

from rft.modes.verify import verify
from rft.modes.verify_graders import certify_graders
from rft.reward import REWARDS
from rft.setup.components import Components
from tests.reward.models.test_scalar import save
from tests.reward.serving.served import KEY, served


@pytest.fixture
def printed(resolved, tmp_path):
    """Whether the reward of a run on a file of questions is certified, and the printed text in one line."""
    rows = [{"prompt": f"{number} + 0 =", "answer": number} for number in (12, 2, 2)]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*overrides):
        console = Console(file=io.StringIO(), width=200)
        data = ("data=questions", f"data.eval.questions.path={file}", "warmup=none", "metric=null")
        holds = certify_graders(Components(resolved("mode=verify", *data, *overrides)), console)
        return holds, " ".join(console.file.getvalue().split())

    return run


def test_a_reward_is_certified(printed):
    holds, text = printed("reward=gsm8k", "verify.rows=2")
    assert holds
    # two rows of each set; of each 3 writings, an empty text, another answer, and 2 texts whose score is not known
    assert "gsm8k 4 12/12 4/4 4/4 28/28" in text and "format 4 – – – 28/28" in text  # noqa: RUF001
    assert "✓ reward.terms.gsm8k: right responses have 1, others and the empty one do not" in text
    assert "✓ reward.terms.format: scores every text, twice the same; it states no right responses" in text


def test_terms_that_servers_compute_are_certified(printed, monkeypatch):
    monkeypatch.setenv("SERVED_KEY", KEY)
    options = {"method": "strict", "markers": ["####"]}
    with served({"gsm8k": {"name": "gsm8k", "weight": 1.0, **options}}, "gsm8k") as address:
        remote = ("reward/terms=[remote]", "reward.accuracy=remote", f"reward.terms.remote.addresses=[{address}]")
        remote += ("reward.terms.remote.token=SERVED_KEY",)
        holds, text = printed(*remote, "verify.rows=2")
        assert holds and "✓ reward.terms.remote: scores every text, twice the same" in text
        server = f"{{addresses: [{address}], token: SERVED_KEY}}"
        http = f"+reward.terms.gsm8k.call={{workers: http, deadline_s: 30, http: {server}}}"
        holds, text = printed("reward=gsm8k", http, "verify.rows=2")
        assert holds and "gsm8k 4 12/12 4/4 4/4 28/28" in text


def test_the_prompts_that_open_a_thought_are_counted(printed, tmp_path):
    template = tmp_path / "thinks.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}<think>")
    run = ("reward/terms=[gsm8k,tags]", "reward.accuracy=gsm8k", f"data.template={template}")
    run = (*run, "actor.tokenizer.alphabet='0123456789 +=<>think'")
    holds, text = printed(*run)
    assert holds and "thoughts: 6 of 6 prompts end inside of one (6 with <think>)" in text
    assert "reward.terms.gsm8k: 6 of 6 responses" in text and "reward.terms.tags: 6 of 6 responses" in text
    # 3 writings, another answer, an empty text, and the first writing in a thought that does not end; 3 other texts
    assert "gsm8k 6 18/18 6/6 6/6 6/6 48/48" in text
    holds, text = printed(*run, "reward.prompt_opens=false")
    assert holds and "thoughts: 6 of 6 prompts" in text and "responses begin" not in text, "the option decides"
    holds, text = printed(*run[:2])
    assert holds and "thoughts: the prompts are not rendered: data.template=chat: the tokenizer has no chat" in text


def test_a_reward_that_does_not_hold_is_shown_with_its_texts(printed, plugins_forgotten):
    register = REWARDS.register("inside", reads=("answer",), writes=lambda row: [f"It is {row['answer']}"])
    register(lambda response, row: float(str(row["answer"]) in response))
    holds, text = printed("reward.terms.exact_match.name=inside", "~reward.terms.exact_match.strip")
    assert not holds
    assert "✗ reward.terms.exact_match: 4 of 30 texts have another score than expected" in text
    assert "data.train " in text and "questions.jsonl line 2: 1, expected 0: 'It is 12'" in text


def test_no_rows_and_no_reward(printed):
    assert printed("verify.rows=0") == (True, "")
    assert printed("algorithm=sft", "eval.loss=true", "rollout=none") == (True, "")


def test_the_command_fails(resolved, plugins_forgotten):
    REWARDS.register("kind", reads=("answer",), writes=lambda row: [str(row["answer"])])(lambda response, row: 1.0)
    config = resolved("mode=verify", "reward.terms.exact_match.name=kind", "~reward.terms.exact_match.strip")
    with pytest.raises(ValueError, match="mode=verify: a term of the reward does not score as it declares"):
        verify(config, Console(file=io.StringIO()))


def test_a_row_that_no_response_answers_is_an_error(printed):
    with pytest.raises(ValueError, match="line 1: the field 'answer' is none of the letters"):
        printed("reward=choice")


@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_reward_model_is_certified(printed, tmp_path, shard):
    save(tmp_path / "scorer")
    model = ("reward/terms=[exact_match,model]", f"reward.terms.model.path={tmp_path / 'scorer'}", "verify.rows=1")
    holds, text = printed(*model, "reward.terms.model.template=none", f"reward.shard={shard}")
    assert holds and "✓ reward.terms.model: scores every text, twice the same" in text
