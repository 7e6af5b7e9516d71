import importlib.util

import pytest

from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment import scripted
from tests.rollout.environment.play.environments import Shop

SHOP = {"shop": {"_target_": f"{Shop.__module__}.Shop"}}


def environments(classes, **changes):
    return Environments.of(EnvironmentOptions(classes=classes, **{**scripted.OPTIONS, **changes}))


def test_one_class_is_that_of_every_row():
    found = environments(SHOP)
    assert found.name_of({}) == found.name_of({"environment": None}) == "shop" and found.scores


def test_all_mistakes_are_named_with_their_keys():
    with pytest.raises(ValueError) as found:
        environments({"a": {"_target_": "nowhere.A"}, "b": {"_target_": f"{scripted.__name__}.ScriptedSampler"}})
    assert "environment.classes.a._target_" in str(found.value) and "environment.classes.b" in str(found.value)
    with pytest.raises(ValueError, match=r"^environment\.classes is empty"):
        environments({})
    with pytest.raises(ValueError, match=r"^environment\.tool_format\.name: no format of tool calls is called 'herm"):
        environments(SHOP, tool_format="hermas")


@pytest.mark.parametrize("package", ["renderers", "httpx"])
def test_a_renderer_needs_its_packages(package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else "found")
    wanted = rf"^environment\.renderer=qwen3: the package {package} is not installed; pip install 'rft\[renderers\]'"
    with pytest.raises(ValueError, match=wanted):
        environments(SHOP, renderer="qwen3")
