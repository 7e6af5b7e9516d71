"""Supervised training against a loop of twenty lines that is transformers and torch alone."""

import pytest
import torch

from rft.actor.init import load_model, read_config
from rft.data.sampler import RowSampler
from tests.e2e.train_stage import TrainStage

STEPS, ROWS = 20, 8
RUN = ("algorithm=sft", f"steps={STEPS}", f"batch.prompts={ROWS}", "eval.every=0", "actor.optimizer.lr=3e-3")


def plain(config, tokenizer, data):
    """Losses and norms of the gradient of every step, from rows that are padded and labelled as transformers wants."""
    options, cursor = config["actor"]["optimizer"], RowSampler(range(len(data)), config["seed"])
    shape = read_config(None, config["actor"]["model_config"], len(tokenizer), "actor")
    model = load_model(None, shape, config["seed"]).train()
    optimizer = torch.optim.AdamW(model.parameters(), options["lr"], options["betas"], options["eps"], 0.0)
    losses, norms = [], []
    for _ in range(STEPS):
        ids, labels = [], []
        for _, number in cursor.take(ROWS):
            prompt, response = (tokenizer(data[number][field]).input_ids for field in ("prompt", "response"))
            response.append(tokenizer.eos_token_id)
            ids.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([-100] * len(prompt) + response))
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = model(input_ids=padded, attention_mask=mask, labels=targets).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("packing", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_supervised_training_is_that_of_a_plain_loop(packing, tiny, tmp_path):
    config = tiny(*RUN, f"actor.packing={packing}", "data.train.length=[2,9]", "actor.micro_batch_tokens=64")
    train = TrainStage(config, tmp_path)
    loaded = train.job.load(1)
    losses, norms = plain(config, loaded.tokenizer, loaded.train)
    rows = [train.step() for _ in range(STEPS)]
    train.close()
    assert [row["loss/nll"] for row in rows] == pytest.approx(losses, abs=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]
