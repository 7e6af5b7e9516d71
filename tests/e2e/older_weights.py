"""Engines that keep the weights of every version, and sample each prompt with those that the test is about."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from rft.rollout.engine.hf import HFEngine

ANSWERED = "answered"  # the file of `Recorded`


class EveryVersion(HFEngine):
    """Samples the prompts one by one, so that their numbers do not depend on how many are asked for at a time."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self.kept, self.changed, self.loaded = {}, threading.Condition(), None

    def keep(self, version, tensors):
        with self.changed:
            self.kept[version] = [(name, tensor.clone()) for name, tensor in tensors]
            self.changed.notify_all()

    def sample(self, version, request, sampling, on_completion=None):
        if self.loaded != version:
            super().update_weights(version, self.kept[version])
            self.loaded = version
        return super().generate([request], sampling, on_completion)[0]

    def sleep(self):
        """The run may still sample."""

    def one_by_one(self, version, requests, sampling, on_completion=None):
        found = []
        for number, request in enumerate(requests):
            with self.changed:

                def completed(_, sample, completion, number=number):
                    if on_completion is not None:
                        on_completion(number, sample, completion)

                found.append(self.sample(version(request), request, sampling, completed))
        return found


class OneStepOff(EveryVersion):
    """A plain loop with weights of the step before: synchronous, but for the age of the weights."""

    def update_weights(self, version, tensors):
        self.keep(version, tensors)

    def generate(self, requests, sampling, on_completion=None):
        return self.one_by_one(lambda request: max(0, max(self.kept) - 1), requests, sampling, on_completion)


class Newest(EveryVersion):
    """Samples beside the trainer with the newest weights."""

    facts = replace(HFEngine.facts, concurrent=True, plain_torch=False)

    def update_weights(self, version, tensors):
        self.keep(version, tensors)

    def generate(self, requests, sampling, on_completion=None):
        return self.one_by_one(self.version_of, requests, sampling, on_completion)

    def version_of(self, request):
        return max(self.kept)


class Oldest(Newest):
    """Samples each prompt that trains with the oldest weights that one-step-off allows."""

    batch = 4

    def version_of(self, request):
        version = max(self.kept) if request.order < 0 else max(0, request.order // self.batch - 1)
        assert version in self.kept, "a prompt that begins before its weights are there"
        return version


class Recorded(Newest):
    """Writes down which prompts it has answered, in the current folder; some take longer than others."""

    def generate(self, requests, sampling, on_completion=None):
        orders = {request.order for request in requests}
        if orders != {-1}:
            time.sleep(0.02 * (7 * sum(orders) % 5))
        found = super().generate(requests, sampling, on_completion)
        with self.changed, Path(ANSWERED).open("a") as file:
            file.writelines(f"{order}\n" for order in orders if order >= 0)
        return found
