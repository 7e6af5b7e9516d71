"""Engines with one fault each, and one that is strict."""

import itertools
import threading
from dataclasses import replace
from functools import partial

import torch

from rft.batch.encoded import as_encoded
from rft.rollout.engine.base import Completion
from rft.rollout.engine.expanded import check_expanded
from rft.rollout.engine.hf import HFEngine
from tests.conftest import ENDS_S
from tests.e2e.older_weights import Newest

ONE = "model.layers.1.self_attn.q_proj.weight"


class ForgetsTemperature(HFEngine):
    def generate(self, requests, sampling, on_completion=None):
        return super().generate(requests, replace(sampling, temperature=1.0), on_completion)


class KeepsFirstWeights(HFEngine):
    kept = False

    def update_weights(self, version, tensors):
        if not self.kept:
            super().update_weights(version, [(name, tensor.clone()) for name, tensor in tensors])
            self.kept = True

    def sleep(self):
        if not self.kept:
            super().sleep()


class KeepsOneTensor(HFEngine):
    """It never takes over one matrix, whose first value is the right one."""

    kept = None

    def update_weights(self, version, tensors):
        given = {name: tensor.clone() for name, tensor in tensors}
        self.kept = given[ONE] if self.kept is None else self.kept
        super().update_weights(version, (given | {ONE: self.kept}).items())


class OneVersionBehind(HFEngine):
    waiting = None

    def update_weights(self, version, tensors):
        handed = [(name, tensor.clone()) for name, tensor in tensors]
        super().update_weights(version, self.waiting or [(name, 0.5 * tensor) for name, tensor in handed])
        self.waiting = handed


class DriftsWithEveryUpdate(HFEngine):
    """Its weights are the older the more often it is handed some, but for those that are made wrong."""

    handed = 0

    def update_weights(self, version, tensors):
        self.handed += 1
        worn = 1.0 if self.handed < 4 else 1.05
        super().update_weights(version, [(name, worn * tensor) for name, tensor in tensors])


class DoublesFirstToken(HFEngine):
    def generate(self, requests, sampling, on_completion=None):
        doubled = [replace(request, prompt=[request.prompt[0], *request.prompt]) for request in requests]
        return super().generate(doubled, sampling, on_completion)


class DropsFirstToken(HFEngine):
    def generate(self, requests, sampling, on_completion=None):
        cut = [replace(request, prompt=request.prompt[1:]) for request in requests]
        return super().generate(cut, sampling, on_completion)


class Rounds(HFEngine):
    def generate(self, requests, sampling, on_completion=None):
        def rounded(completion):
            return replace(completion, logprobs=torch.tensor(completion.logprobs).half().tolist())

        return [[rounded(one) for one in group] for group in super().generate(requests, sampling, on_completion)]


class ComputesInBfloat16(HFEngine):
    def __init__(self, options, context):
        super().__init__(options, replace(context, dtype=torch.bfloat16))


class Lies(HFEngine):
    def generate(self, requests, sampling, on_completion=None):
        def shifted(completion):
            return replace(completion, logprobs=[number - 0.01 for number in completion.logprobs])

        return [[shifted(one) for one in group] for group in super().generate(requests, sampling, on_completion)]


class HeedsNoSeeds(HFEngine):
    numbers = itertools.count()

    def generate(self, requests, sampling, on_completion=None):
        drawn = [replace(request, seeds=[next(self.numbers) for _ in request.seeds]) for request in requests]
        return super().generate(drawn, sampling, on_completion)


class HeedsNeitherSeedsNorTemperature(HeedsNoSeeds):
    def generate(self, requests, sampling, on_completion=None):
        hot = sampling if sampling.temperature == 0 else replace(sampling, temperature=1.0)
        return super().generate(requests, hot, on_completion)


class SamplesOnlyAwake(HFEngine):
    """Sound: it fails if it is asked to sample after it has slept and before it has new weights."""

    awake = False

    def update_weights(self, version, tensors):
        super().update_weights(version, tensors)
        self.awake = True

    def sleep(self):
        self.awake = False

    def generate(self, requests, sampling, on_completion=None):
        assert self.awake
        return super().generate(requests, sampling, on_completion)


class ExpandsItself(HFEngine):
    """Sound: it expands slots to as many placeholders as the trainer, and `lost` less."""

    facts = replace(HFEngine.facts, has_processor=True)
    lost = 0

    def generate(self, requests, sampling, on_completion=None):
        for number, request in enumerate(requests):
            prompt = list(request.prompt)
            assert as_encoded(request.prompt).raw is not None and len(as_encoded(request.prompt).raw.ids) < len(prompt)
            place = next(i for i, token in enumerate(prompt) if token in self.context.media.placeholders) + 1
            check_expanded(number, prompt, prompt[:place] + prompt[place + self.lost :], self.context.tokenizer)
        return super().generate(requests, sampling, on_completion)


class ExpandsToOneLess(ExpandsItself):
    lost = 1


class GoesOn(Newest):
    """Sound: it samples token by token, each with the newest weights.

    In a thread beside the doctor's, answers begin with the policy's weights, and each token waits for newer ones.
    """

    def generate(self, requests, sampling, on_completion=None):
        found = []
        for number, request in enumerate(requests):
            found.append([self.answer(request, sample, sampling) for sample in range(len(request.seeds))])
            for sample, completion in enumerate(found[-1]):
                if on_completion is not None:
                    on_completion(number, sample, completion)
        return found

    def answer(self, request, sample, sampling):
        tokens, logprobs, versions, reason = [], [], [], "length"
        waits = threading.current_thread() is not threading.main_thread()
        while len(tokens) < request.limit(sample, sampling) and reason == "length":
            asked = replace(
                request, prompt=[*request.prompt, *tokens], seeds=[request.seeds[sample] + len(tokens)], limits=[1]
            )
            with self.changed:
                assert not waits or self.changed.wait_for(partial(self.is_next, versions), ENDS_S)
                newest = max(self.kept)
                [one] = self.sample(self.uses(versions, newest), asked, sampling)
            tokens, logprobs, versions = [*tokens, *one.tokens], [*logprobs, *one.logprobs], [*versions, newest]
            reason = one.finish_reason
        text = self.context.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens, logprobs, reason, text, self.stamped(versions))

    def is_next(self, versions):
        first, newest = (self.kept[version][0][1] for version in (min(self.kept), max(self.kept)))
        return max(self.kept) > versions[-1] if versions else first.equal(newest)

    def uses(self, versions, newest):
        return newest

    def stamped(self, versions):
        return versions


class StampsAnswersWithTheLastVersion(GoesOn):
    def stamped(self, versions):
        return versions[-1:] * len(versions)


class GoesOnWithOlderWeights(GoesOn):
    def uses(self, versions, newest):
        return versions[-1] if versions else newest
