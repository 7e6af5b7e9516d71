"""A server that tells what its "model" makes of a text, for scripted faults, in the words of vLLM's or of SGLang's."""

import zlib
from collections import Counter

import torch

from tests.rollout.server.fake_server import FakeServer

ASK = {"vllm": "/v1/completions", "sglang": "/generate"}


def distributions(tokens, vocabulary, seed=0):
    """Log-probabilities in the place of each token but the first: (T - 1, V), made up of the tokens before it."""
    found = []
    for place in range(1, len(tokens)):
        generator = torch.Generator().manual_seed(zlib.crc32(repr((list(tokens[:place]), seed)).encode()))
        found.append((3 * torch.randn(vocabulary, generator=generator)).log_softmax(-1))
    return torch.stack(found)


class FakeTeacher(FakeServer):
    """See `FakeServer`.

    Attributes:
        asked: how often each text was asked for, and with how many likeliest tokens.
        words: spells tokens.
        limit: likeliest tokens that it tells of at most.
    """

    def __init__(self, kind, words, vocabulary, seed=0, context=256, limit=10**6):
        super().__init__()
        self.kind, self.words, self.vocabulary, self.seed, self.context = kind, words, vocabulary, seed, context
        self.asked, self.limit = Counter(), limit

    def perform(self, path, body, fault):
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "owned_by": self.kind, "max_model_len": self.context}]}
        if path == "/detokenize":
            return 200, {{"vllm": "prompt"}.get(self.kind, "text"): self.words.decode(body["tokens"])}
        if path != ASK[self.kind]:
            return 404, {"error": {"message": f"no {path}"}}
        told, count = (self.completion if self.kind == "vllm" else self.input)(body, fault)
        if count > self.limit:
            return 400, {"error": {"message": f"{count} is greater than max allowed: {self.limit}"}}
        return 200, told

    def tell(self, tokens, count, fault):
        """Per place but the first: the number of the token itself, and the likeliest tokens with theirs."""
        self.asked[tuple(tokens), count] += 1
        logprobs = distributions(tokens, self.vocabulary, self.seed)
        if fault == "logits":
            logprobs += 9
        if fault == "short":
            logprobs = logprobs[:-1]
        numbers, ids = logprobs.topk(count - (fault == "fewer"))
        own = [row[token].item() for row, token in zip(logprobs, tokens[1:], strict=False)]
        pairs = zip(ids.tolist(), numbers.tolist(), strict=True)
        return own, [list(zip(*pair, strict=True)) for pair in pairs], logprobs

    def completion(self, body, fault):
        tokens, count = body["prompt"], body["prompt_logprobs"]
        own, top, logprobs = self.tell(tokens, count, fault)
        said = [None]
        for token, number, likeliest, row in zip(tokens[1:], own, top, logprobs, strict=False):
            entry = {"logprob": number, "rank": int((row >= number).sum()), "decoded_token": "?"}
            ranked = {str(name): {"logprob": n, "rank": rank} for rank, (name, n) in enumerate(likeliest, 1)}
            said.append({str(token): entry} | ranked)
        return {"choices": [{"text": "", "prompt_logprobs": said}]}, count

    def input(self, body, fault):
        tokens, count, start = body["input_ids"], body["top_logprobs_num"], body["logprob_start_len"]
        own, top, _ = self.tell(tokens, count, fault)
        first = {"input_token_logprobs": [[None, tokens[start], None]], "input_top_logprobs": [None]}
        pairs = list(zip(own, tokens[1:], strict=False))[start:]
        said = first["input_token_logprobs"] + [[number, token, None] for number, token in pairs]
        about = {"input_token_logprobs": said}
        if count:
            about["input_top_logprobs"] = [None, *([[n, name, None] for name, n in place] for place in top[start:])]
        return {"text": "", "output_ids": [], "meta_info": about}, count
