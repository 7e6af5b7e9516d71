import importlib.util

import pytest

from rft.data.encode.encoder import Encoder
from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import tokenizer
from tests.rollout.environment import scripted
from tests.rollout.environment.play.environments import Shop

SHOP = {"shop": {"_target_": f"{Shop.__module__}.Shop"}}


def environments(classes, **changes):
    options = {**scripted.OPTIONS, "tool_format": "auto", **changes}
    return Environments.of(EnvironmentOptions(classes=classes, **options))


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


def encoder_of(template, before="", after=""):
    """With a text in the template replaced."""
    own = tokenizer(template)
    assert before in template
    own.chat_template = template.replace(before, after) if before else template
    return Encoder(own, "chat", None)


@pytest.mark.parametrize(
    ("template", "format"),
    [(chats.QWEN25, "hermes"), (chats.QWEN3, "hermes"), (chats.DEEPSEEK, "deepseek"), (chats.HARMONY, "harmony")],
)
def test_the_format_of_calls_is_that_of_the_template(template, format):
    encoder = encoder_of(template)
    if encoder.chat.takes_tools:
        environments(SHOP).check(encoder)
    assert environments(SHOP).call_format(encoder)._format.name == format
    assert environments(SHOP, tool_format=format).call_format(encoder)._format.name == format


def refused(format, encoder, message):
    with pytest.raises(ValueError, match=rf"^environment\.tool_format={format}: {message}"):
        environments(SHOP, tool_format=format).check(encoder)


def test_a_template_whose_calls_do_not_come_back_is_refused():
    odd = encoder_of(chats.QWEN25, '{"name": "\' +', '{"called": "\' +')
    form = r"data\.template=chat writes calls of tools in a form that no format reads"
    refused("auto", odd, rf"{form}; set it .*\(deepseek, glm, harmony, hermes, ")
    refused("glm", encoder_of(chats.QWEN25), r"it does not read .*; set it to auto, which is hermes")
    refused("glm", odd, r"it does not read .*; choose another \(deepseek, ")


def test_a_template_that_leaves_out_calls_needs_a_format():
    without = encoder_of(chats.QWEN25, "message.tool_calls", "message.nothing")
    refused("auto", without, r"data\.template=chat writes calls of tools nowhere; set it")
    environments(SHOP, tool_format="hermes").check(without)
