from rft.report.dialogue import dialogue, facts

CALL = {"type": "function", "function": {"name": "price", "arguments": {"item": "<tea>", "count": 2}}}
RECORD = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "an example"},
        {"role": "user", "content": "<b>what?</b>"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "6 EUR"},
        {"role": "assistant", "content": "6"},
    ],
    "opening": 3, "turns": 2, "tool_calls": 1, "tool_failures": 0, "environment_s": 0.25, "forks": ["user: x"],
    "reward": None, "failed": None,
}  # fmt: skip


def test_answers_are_marked_and_text_is_escaped():
    opening, rest = dialogue(RECORD)
    assert "&lt;b&gt;what?&lt;/b&gt;" in opening and "trains" not in opening, "an example of the prompt does not train"
    assert rest.count('class="turn trains"') == 2 and "6 EUR" in rest
    assert "price(item=&quot;&lt;tea&gt;&quot;, count=2)" in rest and "<tea>" not in rest


def test_numbers_below():
    assert facts(RECORD) == {"turns": 2, "tool_calls": 1, "environment_s": 0.25, "forks": "user: x"}


def test_calls_of_the_data_may_have_a_json_text_or_no_arguments():
    calls = [{"name": "f", "arguments": '{"x": 1}'}, {"function": {"name": "g"}}]
    opening, _ = dialogue(
        RECORD | {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}], "opening": 1}
    )
    assert "f({&quot;x&quot;: 1})" in opening and "g()" in opening
