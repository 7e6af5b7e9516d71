"""Wrong values at random keys: a run accepts them, or refuses them in one message that names the key."""

import copy
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft.setup.components import Components

RUNS = (
    (),
    ("algorithm=ppo",),
    ("algorithm=sft",),
    ("algorithm=dpo", "warmup=none"),
    ("rollout=vllm_server", "algorithm/correction=token_tis"),
    ("algorithm=gkd", "teacher.path=x"),
    ("algorithm=on_policy_distill", "teacher=teacher_server", "teacher.addresses=[a:1]"),
)
NUMBERS = [math.nan, math.inf, -1, -5, 0, 0.0, -0.0, 1.5, 1e30, 10**12, 10**400, None, True, False]
TEXTS = ["", "abc", "../x", "\0", "a b", "$", "[", "nan", "9" * 400, "\ud800"]
NODES = [[], {}, [0.9], [""], ["x", ["y"]], {"name": "x"}, {"_target_": "os.getcwd"}]


def leaves(node, path=()):
    if isinstance(node, dict) and node:
        for name, below in node.items():
            yield from leaves(below, (*path, name))
    else:
        yield path


@pytest.fixture(scope="module")
def configs(resolved):
    found = [resolved(*overrides) for overrides in RUNS]
    return [(config, list(leaves(config))) for config in found]


@pytest.mark.slow
@settings(deadline=None, max_examples=1000, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_wrong_value_is_refused_with_its_key(configs, data):
    config, paths = configs[data.draw(st.integers(0, len(RUNS) - 1))]
    changed, path = copy.deepcopy(config), data.draw(st.sampled_from(paths))
    node = changed
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = copy.deepcopy(data.draw(st.sampled_from(NUMBERS + TEXTS + NODES)))
    try:
        Components(changed)
    except ValueError as error:  # any other error fails the test
        assert any(".".join(path[:count]) in str(error) for count in range(1, len(path) + 1))
