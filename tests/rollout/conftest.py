"""Fake servers and engines for them, which are gone at the end of a test."""

import pytest

from rft.distributed import start
from tests.rollout.server.fake_server import FakeServer
from tests.rollout.server.scripted import KINDS, make_engine


@pytest.fixture(params=list(KINDS))
def kind(request):
    """The kind of servers."""
    return request.param


@pytest.fixture
def fakes():
    """Starts fake servers."""
    started = []

    def more(count=2, **options):
        found = [FakeServer(**options) for _ in range(count)]
        started.extend(found)
        return found

    yield more
    for fake in started:
        fake.kill()


@pytest.fixture
def engine(tmp_path):
    """Makes engines."""
    made = []

    def make(kind, servers=(), **changes):
        made.append(make_engine(start("cpu"), KINDS[kind](), tmp_path, servers, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()
