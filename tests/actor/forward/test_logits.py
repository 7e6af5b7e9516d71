"""Ids that cannot follow: which they are, and that engine, policy, reference and teacher leave out the same ones."""

import copy

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rft.actor.base import ModelContext
from rft.actor.forward.logits import FORBIDDEN, forbid_, forbidden_logits, forbidden_tokens, vocabulary_size
from rft.actor.teacher import Teacher, TeacherOptions
from rft.data.encode.tokenizer import characters
from rft.modes.plan.stubs import StubTokenizer
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import Sampling
from tests.helpers import ALPHABET, MODEL, hf_engine, make_actor, make_strategy, token_batch, yaml_options
from tests.rollout.media import MEDIA

CPU = torch.device("cpu")
TOKENS = 19
SAMPLING = Sampling(max_new_tokens=12, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)


class Listed:
    """A tokenizer that lists these ids, by text."""

    def __init__(self, listed, is_fast=True, vocab_size=0, added=()):
        self.listed, self.is_fast, self.vocab_size, self.reads = listed, is_fast, vocab_size, 0
        self.added_tokens_decoder = dict(added)

    def __len__(self):
        return len({**self.listed, **self.added_tokens_decoder})

    def get_vocab(self):
        self.reads += 1
        return dict(self.listed)


def fast(*ids):
    return Listed({str(number): number for number in ids})


def test_which_ids_cannot_follow():
    assert forbidden_tokens(5, fast(*range(5)), None) == ()
    assert forbidden_tokens(8, fast(0, 1, 2, 5), None) == (3, 4, 6, 7) and vocabulary_size(fast(0, 1, 2, 5)) == 6
    assert forbidden_tokens(3, fast(0, 1, 2, 5), None) == (), "a token without a row"
    assert forbidden_tokens(11, fast(*range(10)), MEDIA) == (8, 9, 10)
    assert forbidden_tokens(9, fast(*range(10)), MEDIA) == (8,), "the media of a larger model"


def test_ids_of_a_python_tokenizer_that_share_a_text_can_follow():
    """Such as the control tokens of ChatGLM, whose text is empty: one of them is listed, and one is the end token."""
    shared = Listed({"": 3, "a": 4, "b": 5}, is_fast=False, vocab_size=6, added={7: "<end>"})
    assert forbidden_tokens(9, shared, None) == (6, 8) and vocabulary_size(shared) == 8


def test_a_vocabulary_is_read_once_until_tokens_are_added():
    tokenizer = fast(0, 1, 2)
    assert [vocabulary_size(tokenizer), vocabulary_size(tokenizer)] == [3, 3]
    assert forbidden_tokens(5, tokenizer, None) == (3, 4) and tokenizer.reads == 1
    tokenizer.listed["4"] = 4
    assert vocabulary_size(tokenizer) == 5 and forbidden_tokens(5, tokenizer, None) == (3,) and tokenizer.reads == 2
    real = characters(alphabet="01")
    assert vocabulary_size(real) == 5 and real.add_tokens(["<more>"]) == 1 and vocabulary_size(real) == 6


def test_without_a_tokenizer_all_ids_can_follow():
    assert forbidden_tokens(5, StubTokenizer(0), None) == () and vocabulary_size(StubTokenizer(0)) == 0
    assert forbidden_tokens(5, StubTokenizer(3), None) == (3, 4) and vocabulary_size(StubTokenizer(3)) == 3


def test_the_bias_reaches_from_the_first_id_to_the_end():
    assert forbidden_logits((), 8, CPU) is None
    added = forbidden_logits((3, 6), 8, CPU)
    assert added.tolist() == [FORBIDDEN, 0, 0, FORBIDDEN, 0]
    logits = forbid_(torch.zeros(2, 8), added)
    assert logits.softmax(-1).mul(6).tolist() == [[1, 1, 1, 0, 1, 1, 0, 1]] * 2
    assert forbid_(logits, None) is logits


def checkpoint(folder, rows, seed):
    """A saved model with so many rows of embeddings, of which the last ones are the likeliest by far."""
    options = {name: value for name, value in MODEL.items() if name != "model_type"}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**options, vocab_size=rows)).eval()
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 30
    model.save_pretrained(folder)
    characters(alphabet=ALPHABET).save_pretrained(folder)
    return model


@torch.no_grad()
def test_models_with_other_padding_have_one_vocabulary(world, tmp_path):
    """An actor of 24 rows, a reference of 20 and a teacher of 22, for 19 tokens."""
    rows = {"actor": 24, "reference": 20, "teacher": 22}
    models = {key: checkpoint(tmp_path / key, count, count) for key, count in rows.items()}
    tokenizer, strategy = characters(alphabet=ALPHABET), make_strategy(world)
    prompts = [[3, 4, 5], [6, 7]]
    engine = hf_engine(copy.deepcopy(models["actor"]), tokenizer, 64)
    found = engine.generate([Request(prompt, list(range(8))) for prompt in prompts], SAMPLING)
    answers = [(prompt, sample) for prompt, group in zip(prompts, found, strict=True) for sample in group]
    assert max(token for _, sample in answers for token in sample.tokens) < TOKENS
    masks = [[False] * len(prompt) + [True] * len(sample.tokens) for prompt, sample in answers]
    batch = token_batch(*([*prompt, *sample.tokens] for prompt, sample in answers),
                        response_mask=[torch.tensor(mask) for mask in masks])  # fmt: skip
    batch["loss_mask"] = keep = batch["response_mask"]
    sampled = torch.tensor([number for _, sample in answers for number in sample.logprobs])

    given = {"model_config": None, "micro_batch_tokens": 99, "packing": True, "share_prefix": False, "liger": False}
    given |= {"path": str(tmp_path / "teacher"), "trust_remote_code": False, "top_k": 64}
    options = yaml_options("teacher/teacher.yaml", **given)
    teacher = Teacher(ModelContext("teacher", world, strategy, tokenizer, 7), TeacherOptions(**options))
    actor, reference = (
        make_actor(world, strategy, key=key, path=str(tmp_path / key), model_config=None) for key in list(rows)[:2]
    )
    outputs = ("logprobs", "entropy")
    columns = {"actor": actor.compute(batch, outputs, 1.0), "reference": reference.compute(batch, outputs, 1.0)}
    columns["teacher"] = teacher.compute(batch, ("logprobs", "entropy", "top_ids", "top_logprobs"), 1.0)
    torch.testing.assert_close(columns["actor"]["logprobs"][keep], sampled, rtol=0, atol=1e-5)
    for key, model in models.items():
        ids, attention = batch["tokens", "input_ids"], batch["tokens", "attention_mask"]
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1, :TOKENS].double()
        logp = torch.nn.functional.pad(logits.log_softmax(-1), (0, 0, 1, 0))
        own = logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
        for name, expected in zip(outputs, own, strict=True):
            torch.testing.assert_close(columns[key][name][keep].double(), expected[keep], rtol=1e-5, atol=1e-5)
    likeliest = logp.topk(TOKENS)
    assert torch.equal(columns["teacher"]["top_ids"][keep].long(), likeliest.indices[keep])
    torch.testing.assert_close(
        columns["teacher"]["top_logprobs"][keep].double(), likeliest.values[keep], rtol=1e-5, atol=1e-5
    )


def test_a_vocabulary_without_padding_has_no_bias(world):
    assert make_actor(world, make_strategy(world), model_config=MODEL).network.forbidden == ()
