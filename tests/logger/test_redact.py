"""Values of environment variables are used, and neither written nor shown, in whatever spelling."""

import copy
import html
import json
import logging
import pickle
import re
import sys
import threading
import traceback
from typing import Literal
from urllib.parse import quote, quote_plus

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from rft import redaction
from rft.logger.redact import ResolvedText, public_config, resolve
from rft.redaction import hide, redact, redact_log_records, redact_tracebacks
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


TEXT = "${oc.env:RFT_T_SECRET}"
SECRETS = [
    "hunter2-hunter2",
    "abc+/d==",
    'it\'s "so" <&>',
    "back\\slash\\\\s",
    "line\nbreak\t.",
    "f(1)é ü",
    "sk-31415\n",
]
WRITERS = {
    "str": str,
    "repr": repr,
    "repr beside both quotes": lambda text: repr(f"'\"{text}'\""),
    "repr of an error": lambda text: repr(ValueError(repr(text))),
    "bytes": lambda text: repr(text.encode()),
    "json": json.dumps,
    "json, not ascii": lambda text: json.dumps(text, ensure_ascii=False),
    "json in json": lambda text: json.dumps(json.dumps({"key": text})),
    "url": lambda text: quote(text, safe=""),
    "path of a url": quote,
    "form": quote_plus,
    "url, lower case": lambda text: quote(text, safe="").replace("%3D", "%3d").replace("%2F", "%2f"),
    "url twice": lambda text: quote(quote(text, safe=""), safe=""),
    "html": html.escape,
}


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    """No value of another test is hidden, and the hooks of this process stay."""
    monkeypatch.setattr(redaction, "_hidden", {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


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
        assert (other, type(other), other.source) == (SECRET, ResolvedText, "${oc.env:RFT_T_SECRET}")
    assert convert(ResolvedText("a", ""), Literal["a", "b"], "key") == "a"


def test_messages_have_the_name_of_the_variable(config):
    resolve(config)
    assert redact(f"{SECRET} of {SECRET}/file") == "${oc.env:RFT_T_SECRET} of ${oc.env:RFT_T_SECRET}/file"
    assert redact("40 steps") == "40 steps", "a short value is part of other words"
    assert redact("~/here") == "~/here", "a default is no value of a variable"
    assert redact("first-word") == "${oc.decode:${oc.env:RFT_T_WORDS}}"


def test_errors_are_those_of_omegaconf(monkeypatch):
    with pytest.raises(MissingMandatoryValue, match="Missing mandatory value: a"):
        resolve(OmegaConf.create({"a": "???"}))
    with pytest.raises(InterpolationResolutionError, match="RFT_T_UNSET"):
        resolve(OmegaConf.create({"a": "${oc.env:RFT_T_UNSET}"}))


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_spelling_of_a_value_is_replaced(writer, secret):
    write = WRITERS[writer]
    hide(secret, TEXT)
    found = redact(f"before {write(secret)} after")
    assert found.startswith("before ") and found.endswith(" after") and found.count(TEXT) == 1
    left = found.replace(TEXT, "").removeprefix("before ").removesuffix(" after")  # what the writer adds
    assert not any(word in left for word in re.findall(r"\w+", secret))


def test_other_texts_stay():
    hide("abc+/d==", TEXT)
    hide("short", "no")
    for text in ("abc /d==", "abc+/d=", "abc%2B/d=%3C", "a short word", "abc\\n+/d=="):
        assert redact(text) == text


def test_a_header_has_a_value_without_its_line_end():
    hide("sk-314159\n", TEXT)
    assert redact("Bearer sk-314159, 'sk-314159\\n'") == f"Bearer {TEXT}, '{TEXT}'"


def test_longer_values_are_replaced_first():
    hide("secret", "A")
    hide("secret/file", "B")
    assert redact("secret secret/file") == "A B"


def test_log_records_and_their_tracebacks_are_redacted(caplog):
    hide("hunter2-hunter2", TEXT)
    root, found = logging.getLogger(), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(handler.format(record))
    root.addHandler(handler)
    try:
        redact_log_records()
        redact_log_records()
        logging.getLogger("x").warning("%s of %d", "hunter2-hunter2", 3)
        try:
            raise KeyError("hunter2-hunter2")
        except KeyError:
            logging.getLogger("x").exception("it failed")
        logging.getLogger("x").warning("a server: %s", "\x1b[31m\r")
    finally:
        root.removeHandler(handler)
    assert found[0] == f"{TEXT} of 3" and len(handler.filters) == 1
    assert found[2] == "a server:  [31m "
    assert found[1].startswith("it failed\nTraceback") and found[1].endswith(f"KeyError: '{TEXT}'")


def test_a_program_without_handlers_logs_redacted_lines(monkeypatch, capsys):
    hide(SECRET, TEXT)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    redact_log_records()
    logging.getLogger("x").warning("%s of %d", "hunter2-hunter2", 3)
    assert capsys.readouterr().err == f"{TEXT} of 3\n"


def test_each_line_of_a_longer_value_is_hidden():
    hide("-----BEGIN KEY-----\nMIIEvQ1x\n42\n", "${oc.env:PEM}")
    assert redact("it reads MIIEvQ1x, then 42") == "it reads ${oc.env:PEM}, then 42"


def test_the_traceback_of_a_bug_is_redacted(capsys):
    hide("abc+/d==", TEXT)
    redact_tracebacks()

    def bug():
        raise KeyError("abc+/d==")

    try:
        bug()
    except KeyError as error:
        plain = "".join(traceback.format_exception(error)).replace("KeyError: 'abc+/d=='", f"KeyError: '{TEXT}'")
        sys.excepthook(KeyError, error, error.__traceback__)
    assert capsys.readouterr().err == plain.replace('"abc+/d=="', f'"{TEXT}"')
    thread = threading.Thread(target=bug)
    thread.start()
    thread.join()
    printed = capsys.readouterr().err
    assert f"KeyError: '{TEXT}'" in printed and "abc" not in printed
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
    assert capsys.readouterr().err == ""
