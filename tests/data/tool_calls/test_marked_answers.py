from rft.data.tool_calls import TOOL_CALLS, ToolCall, calls_of

ONE = {"function": {"name": "calculate", "parameters": {"properties": {"expression": {}, "digits": {}}}}}
NONE = {"function": {"name": "look", "parameters": {"properties": {}}}}


def test_marks():
    marks = TOOL_CALLS.build({"name": "mark", "marks": {"?": "calculate", "!": "look", "#": "none"}}, "k")
    tools = {"calculate": ONE, "look": NONE}
    assert marks("?3*4", tools) == ("?3*4", [ToolCall("calculate", {"expression": "3*4"})])
    assert marks("!", tools) == ("!", [ToolCall("look", {})]) and marks("12", tools) == ("12", [])
    assert marks("#5", tools) == ("#5", [ToolCall("none", {})]), "the environment says that there is no such tool"
    assert not marks.facts.described and TOOL_CALLS.build({"name": "hermes"}, "k").facts.described


def test_an_answer_that_begins_with_a_mark_behind_its_thought():
    marks = TOOL_CALLS.build({"name": "mark", "marks": {"?": "calculate"}}, "k")
    content, calls = calls_of("<think>?1</think>\n\n?<think>", {"calculate": ONE}, marks, None)
    assert content == "<think>?1</think>\n\n?<think>" and calls == [ToolCall("calculate", {"expression": "<think>"})]


def test_a_mark_with_which_a_thought_begins_too():
    marks = TOOL_CALLS.build({"name": "mark", "marks": {"<": "calculate"}}, "k")
    tools = {"calculate": ONE}
    assert calls_of("<think></think><1", tools, marks, None)[1] == [ToolCall("calculate", {"expression": "1"})]
