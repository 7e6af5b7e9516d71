import importlib
import sys
from pathlib import Path

from rft.data.tool_calls import TOOL_CALLS, ToolCall, assistant_message, calls_of

PLUGINS = Path(__file__).parents[2] / "e2e" / "plugins"


def test_the_message_of_an_answer():
    assert assistant_message("a", []) == {"role": "assistant", "content": "a"}
    found = assistant_message("a", [ToolCall("f", {"x": 1}), "broken"])
    assert found["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_the_format_of_the_page_on_extending(plugins_forgotten):
    sys.path.insert(0, str(PLUGINS))
    importlib.import_module("arrows")
    arrow = TOOL_CALLS.build({"name": "arrow"}, "k")
    assert calls_of("So\n-> find <think>", {}, arrow, None) == ("So", [ToolCall("find", {"text": "<think>"})])
    assert calls_of("<think>-> a</think> ->", {}, arrow, None) == ("<think>-> a</think>", ["no name stands behind ->"])
    assert calls_of(" plain", {}, arrow, None) == (" plain", [])
