"""An engine whose answers a function writes."""

from pathlib import Path

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.rollout.answerer import RowRequests
from rft.rollout.engine.base import Completion
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.episodes import EpisodeAnswerer
from rft.rollout.environment.options import EnvironmentOptions, Environments
from rft.rollout.sampler import Sampler

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = str(Path(__file__).parent / "turns_with_tools.jinja")
SAMPLING = Sampling(max_new_tokens=200, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)
OPTIONS = {
    "tool_format": "hermes",
    "max_turns": 5,
    "max_tokens": 2000,
    "max_seconds": None,
    "tool_deadline_s": 5.0,
    "tool_max_tokens": 100,
    "workers": "inline",
    "concurrency": 64,
    "renderer": None,
}


class ScriptedSampler(Sampler):
    """Answers a prompt by a function of its text; a log-probability is minus the number of the token.

    Attributes:
        batches: the texts of the prompts of each call.
    """

    def __init__(self, tokenizer, write):
        self.tokenizer = tokenizer
        self.write = write
        self.batches = []

    def generate(self, requests, sampling, on_completion=None):
        prompts = [self.tokenizer.decode(request.prompt) for request in requests]
        self.batches.append(prompts)
        found = []
        for number, request in enumerate(requests):
            text = self.write(prompts[number])
            ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
            most = request.limit(0, sampling)
            reason = "stop" if len(ids) <= most else "length"
            ids = ids[:most]
            shown = self.tokenizer.decode(ids, skip_special_tokens=True)
            completion = Completion(ids, [-float(n) for n in range(len(ids))], reason, shown, [3] * len(ids))
            on_completion(number, 0, completion)
            found.append([completion])
        return found

    def publish(self, version, weights, model="actor"):
        raise AssertionError("nothing trains here")

    def release(self):
        raise AssertionError("nothing trains here")


def play(write, classes, rows, samples=1, template=TEMPLATE, context=4000, forced_stop=None, **options):
    """The trajectories of every row, and the sampler.

    Args:
        write: the text of an answer to the text of a prompt.
        classes: the nodes of the environments by name.
    """
    tokenizer = characters(alphabet=ALPHABET)
    encoder = Encoder(tokenizer, template, None)
    environments = Environments.of(EnvironmentOptions(classes=classes, **{**OPTIONS, **options}))
    sampler = ScriptedSampler(tokenizer, write)
    announced = {}
    answerer = EpisodeAnswerer(environments, encoder, sampler, context)
    try:
        seeds = [[100 * number + sample for sample in range(samples)] for number in range(len(rows))]
        found = answerer.answer(
            RowRequests(rows, seeds, SAMPLING, forced_stop),
            lambda number, sample, trajectory: announced.update({(number, sample): trajectory}),
        )
    finally:
        answerer.close()
    assert announced == {(i, j): one for i, group in enumerate(found) for j, one in enumerate(group)}
    return found, sampler
