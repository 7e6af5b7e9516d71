import pytest

from rft.data.tool_calls import TOOL_CALLS, ToolCall

CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain ", "plain", []),
        ("<|channel|>final<|message|>so", "so", []),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so<|return|>", "so", []),
        ("<|channel|>analysis<|message|>hm", "hm", []),
        (CALL, "", [ToolCall("f", {})]),  # an engine may leave out the token that ends an answer
        (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", "", [ToolCall("f", {})] * 2),
        (f"{CALL}<|start|>assistant{CALL}", "", [ToolCall("f", {})] * 2),
        ("<|channel|>analysis to=browser.open code<|message|>{}<|call|>", "", [ToolCall("browser.open", {})]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "", ["the arguments of python are no JSON"]),
        (f"{CALL[:-1]}<|call|>", "", ["the arguments of f are no JSON (Expecting property name"]),
        (CALL[:-1], "", ["the call of f is not closed"]),
        ("<|channel|>commentary to=functions.f <|constrain|>json", "", ["the call of f has no <|message|>"]),
        ("<|channel|>commentary to=functions.f <|message|>[]<|call|>", "", ["the arguments of the call are no object"]),
        (f"<|channel|>commentary<|message|>1<|end|><|start|>assistant{CALL}<|call|>", "1", [ToolCall("f", {})]),
    ],
)
def test_messages_of_an_answer(text, content, calls):
    found = TOOL_CALLS.build({"name": "harmony"}, "k")(text, {})
    assert found[0] == content and len(found[1]) == len(calls)
    for one, expected in zip(found[1], calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected
