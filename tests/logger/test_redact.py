"""Values of environment variables are used, and neither written nor shown."""

import copy
import json
import logging
import pickle
from typing import Literal

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from rft.logger.redact import EnvironmentText, public_config, redact, redact_log_records, resolve
from rft.registry import convert

SECRET = "hunter2-hunter2"
BODY = """
plain: text
number: 3
nothing: null
path: ${oc.env:RFT_T_SECRET}/file
key: ${oc.env:RFT_T_SECRET}
again: ${key}
node: {deep: [a, "${oc.env:RFT_T_SECRET}", {x: "${..0}"}], own: "${plain}"}
whole: ${node.deep}
unset: ${oc.env:RFT_T_UNSET,'~/here'}
null_default: ${oc.env:RFT_T_UNSET,null}
decoded: ${oc.decode:${oc.env:RFT_T_STEPS}}
words: ${oc.decode:${oc.env:RFT_T_WORDS}}
"""


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("RFT_T_SECRET", SECRET)
    monkeypatch.setenv("RFT_T_STEPS", "40")
    monkeypatch.setenv("RFT_T_WORDS", "[first-word, 2]")
    return OmegaConf.create(BODY)


def test_the_run_gets_the_values(config):
    assert resolve(config) == OmegaConf.to_container(config, resolve=True)


def test_files_get_the_text_of_the_yaml(config):
    public = public_config(resolve(config))
    assert SECRET not in json.dumps(public)
    assert public == {
        "plain": "text",
        "number": 3,
        "nothing": None,
        "path": "${oc.env:RFT_T_SECRET}/file",
        "key": "${oc.env:RFT_T_SECRET}",
        "again": "${key}",
        "node": {"deep": ["a", "${oc.env:RFT_T_SECRET}", {"x": "a"}], "own": "text"},
        "whole": ["a", "${oc.env:RFT_T_SECRET}", {"x": "a"}],
        "unset": "${oc.env:RFT_T_UNSET,'~/here'}",
        "null_default": None,
        "decoded": 40,
        "words": ["${oc.decode:${oc.env:RFT_T_WORDS}}", 2],
    }


def test_a_file_of_public_values_resolves_to_the_same_run(config):
    public = public_config(resolve(config))
    again = resolve(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(public))))
    expected = resolve(config)
    del again["words"], expected["words"]  # of a decoded list the file has the origin of each text
    assert again == expected


def test_a_value_keeps_its_origin_where_it_is_copied(config):
    key = resolve(config)["key"]
    for other in (copy.deepcopy(key), pickle.loads(pickle.dumps(key)), convert(key, str, "key")):
        assert (other, type(other), other.source) == (SECRET, EnvironmentText, "${oc.env:RFT_T_SECRET}")
    assert convert(EnvironmentText("a", ""), Literal["a", "b"], "key") == "a"


def test_messages_have_the_name_of_the_variable(config):
    resolve(config)
    assert redact(f"{SECRET} of {SECRET}/file") == "${oc.env:RFT_T_SECRET} of ${oc.env:RFT_T_SECRET}/file"
    assert redact("40 steps") == "40 steps", "a short value is part of other words"
    assert redact("~/here") == "~/here", "a default is no value of a variable"
    assert redact("first-word") == "${oc.decode:${oc.env:RFT_T_WORDS}}"


def test_log_records_have_the_name_of_the_variable(config, caplog):
    resolve(config)
    root, found = logging.getLogger(), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    root.addHandler(handler)
    redact_log_records()
    redact_log_records()
    logging.getLogger("x").warning("%s of %d", SECRET, 3)
    logging.getLogger("x").warning("a server: %s", "\x1b[31m\r")
    assert found == ["${oc.env:RFT_T_SECRET} of 3", "a server:  [31m "] and len(handler.filters) == 1


def test_errors_are_those_of_omegaconf(monkeypatch):
    with pytest.raises(MissingMandatoryValue, match="Missing mandatory value: a"):
        resolve(OmegaConf.create({"a": "???"}))
    with pytest.raises(InterpolationResolutionError, match="RFT_T_UNSET"):
        resolve(OmegaConf.create({"a": "${oc.env:RFT_T_UNSET}"}))
