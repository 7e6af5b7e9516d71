"""Tool calls as models write them: the formats, and the calls of an answer."""

from rft.data.tool_calls.base import TOOL_CALLS, Found, Schema, ToolCall, assistant_message, calls_of, without_thoughts
from rft.data.tool_calls.find_format import find_format, read_by, reads_calls
from rft.imports import import_all

__all__ = [
    "TOOL_CALLS",
    "Found",
    "Schema",
    "ToolCall",
    "assistant_message",
    "calls_of",
    "find_format",
    "read_by",
    "reads_calls",
    "without_thoughts",
]

import_all(__name__)
