"""What tests of servers share: an engine for fake ones, what it is asked, and what is right."""

import contextlib
import functools
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.engine import ServersEngine
from rft.rollout.server.options import Servers
from rft.rollout.server.sglang import SGLangApi
from rft.rollout.server.vllm import VLLMApi
from tests.helpers import engine_context
from tests.rollout.server.fake_server import answer_of, checksum
from tests.rollout.word_models import word_tokenizer

SAMPLING = Sampling(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
OPTIONS = {
    "addresses": [],
    "count": 0,
    "python": None,
    "token": None,
    "dtype": None,
    "transport": "folder",
    "deltas": False,
    "sleep": False,
    "concurrency": 8,
    "retries": 3,
    "start_s": 10.0,
    "sync_s": 10.0,
    "answer_s": 10.0,
    "poll_s": 0.02,
}
KINDS = {"vllm": lambda: VLLMApi({}), "sglang": lambda: SGLangApi({})}
ASK = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
MODEL = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "eos_token_id": 2,
}


@functools.cache
def plain_model() -> Qwen3ForCausalLM:
    """The model of an engine that reads its shape alone, as its weights are those of `weights`."""
    return Qwen3ForCausalLM(Qwen3Config(**MODEL))


def make_engine(
    world, server_api, folder: Path, servers=(), model=None, while_updating=None, **changes
) -> ServersEngine:
    """An engine for servers that run, with short deadlines; `changes` are of the options."""
    options = OPTIONS | {"addresses": [server.address for server in servers]} | changes
    model = model or plain_model()

    class Kind(ServersEngine):
        @staticmethod
        def server_api(engine_args, media=None, forbidden=()):
            return server_api

    context = engine_context(model, word_tokenizer(40), folder, world)
    return Kind(Kind.Options(servers=Servers(**options)), replace(context, while_updating=while_updating))


def current(samples):
    """How many servers of an engine serve the current version."""
    return len(samples._servers) - len(samples._pool._behind())


async def load_from_folder(server_api, client, weights):
    """Lets a server load a version from its folder, without knowing what it has."""
    transport = await server_api.transport(client, Servers(**OPTIONS | {"count": 1}), torch.device("cpu"))
    await server_api.load(client, weights, None, transport)


@contextlib.contextmanager
def deadlines(samples, **seconds):
    """Other deadlines of an engine for a while: short ones are for what never comes, as a busy machine misses them."""
    before = {name: getattr(samples.options.servers, name) for name in seconds}
    vars(samples.options.servers).update(seconds)
    yield
    vars(samples.options.servers).update(before)


def tied_model(vocabulary):
    """A tied model whose generation config names other end tokens than the tokenizer, and ways to sample of its own."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    words = {"vocab_size": vocabulary, "eos_token_id": 5, "bos_token_id": None, "tie_word_embeddings": True}
    config = Qwen3Config(**shape, **heads, **words, initializer_range=0.2, dtype="float32")
    made = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    own = {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.3, "top_k": 2, "repetition_penalty": 1.5}
    made.generation_config.update(**own)
    return made


def requests(groups=6, samples=4):
    """Groups with prompts and seeds of their own."""
    prompts = [[5 + number % 30, 7 + number // 30] for number in range(groups)]
    return [Request(p, [100 * number + sample for sample in range(samples)]) for number, p in enumerate(prompts)]


class Announced(list):
    """The places (request, sample) that an engine announces.

    Args:
        at: how many of them there are when `act` is called.
    """

    def __init__(self, at=0, act=None):
        super().__init__()
        self.at, self.act = at, act

    def __call__(self, request, sample, completion):
        self.append((request, sample))
        if len(self) == self.at:
            self.act()

    def all_once(self, groups=6, samples=4):
        """Whether each sample of `requests(groups, samples)` was announced once."""
        return sorted(self) == [(group, sample) for group in range(groups) for sample in range(samples)]


def weights(version):
    """Of a model with one tensor that trains and one that does not."""
    return {"w": torch.full((4,), float(version)), "still": torch.ones(3)}


def right(asked, version):
    """What servers with the weights of a version sample: tokens and log-probabilities of every group."""
    held = checksum({name: tensor.numpy().tobytes() for name, tensor in weights(version).items()})
    return [[answer_of(r.prompt, seed, SAMPLING.max_new_tokens, held)[:2] for seed in r.seeds] for r in asked]


def said(groups):
    """Tokens and log-probabilities of completions."""
    return [[(row.tokens, row.logprobs) for row in group] for group in groups]
