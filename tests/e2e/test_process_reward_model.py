"""A process reward model from labelled steps to reward: trained, exported, and asked by a run that samples."""

import json

import pytest
import torch

from rft.distributed import stop
from rft.modes.plan.job import PlanJob
from rft.setup.assembly import Job
from tests.reward.models.test_process_model import node
from tests.reward.reward_of import reward_of


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_plan_goes_through_it(resolved):
    small = ("batch.prompts=4", "steps=1", "rollout.max_new_tokens=5", "data.train.count=64")
    stop()
    forecast = PlanJob(resolved("algorithm=process_reward_model", "plan.prompt_tokens=6", *small), 1).forecast()
    assert forecast.memory["update"]["activations"] > 0 and forecast.fullest > 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout=hf",), "actor.head=step: a model with this head cannot generate text; choose rollout=none"),
        (("actor.head=score",), "algorithm.loss: 'step_cross_entropy' trains the head 'step', but actor.head=score"),
        (("algorithm/source=pairs",), "algorithm.loss reads the column 'step_labels', which nothing before it writes"),
        (("actor/lora=lora",), "actor.lora: adapters do not train the head of actor.head=step"),
        (("strategy.context_parallel=2",), "strategy.context_parallel=2: with actor.head=step every rank reads"),
        (("metric=eval/heldout/margin",), "metric=eval/heldout/margin: the run has no such metric"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(overrides, said, resolved):
    with pytest.raises(ValueError) as caught:
        Job(resolved("algorithm=process_reward_model", *overrides))
    assert said in str(caught.value)


@pytest.mark.slow
def test_it_learns_and_scores_the_answers_of_another_run(resolved, tiny, tmp_path):
    """The term gives an answer the score that the evaluation told."""
    trained = tmp_path / "trained"
    small = ("steps=40", "actor.optimizer.lr=1e-3", "eval.every=0", "data.eval.heldout.count=64")
    Job(resolved("algorithm=process_reward_model", *small, f"output_dir={trained}")).fit("")
    first, last = lines(trained)[0], lines(trained)[-1]
    assert first["eval/heldout/accuracy"] < 0.75 and last["eval/heldout/accuracy"] > 0.9
    assert last["eval/heldout/probability_good"] - last["eval/heldout/probability_bad"] > 0.5

    told = [json.loads(line) for line in (trained / "trajectories/step_00000040.jsonl").read_text().splitlines()]
    path = trained / "checkpoints/latest/actor"
    reward = reward_of({"steps": node(path, separator="\n")}, accuracy="steps")
    scores = reward.score([row["response"] for row in told], told).total
    torch.testing.assert_close(scores, torch.tensor([row["score"] for row in told]), rtol=1e-5, atol=1e-5)
    assert scores.std() > 0.1

    terms = ("reward/terms=[exact_match,format,process_model]", f"reward.terms.process_model.path={path}")
    Job(tiny(*terms, "steps=1", "warmup=none")).fit("")
    assert 0 < lines(tmp_path / "run")[-1]["reward/process_model"] < 1
