"""What becomes of weights that are sent to scripted servers."""

import time

from tests.conftest import SOON_S
from tests.rollout.server.scripted import SAMPLING, requests, right, said, weights

OWN = "vLLM's own"  # a transport of tests: group, with vLLM's own weight transfer


def outcome(samples, version, tensors=None):
    """What a sync comes to: empty where it is committed, else the error."""
    begun = time.monotonic()
    try:
        samples.update_weights(version, (tensors or weights(version)).items())
        return ""
    except OSError as error:
        return str(error)
    finally:
        assert time.monotonic() - begun < SOON_S


def committed(samples, version):
    """Whether what is sampled now is of the version alone."""
    return said(samples.generate(requests(2), SAMPLING)) == right(requests(2), version)
