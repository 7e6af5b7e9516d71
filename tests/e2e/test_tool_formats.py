"""The built-in tool in the formats of other models, through supervised and reinforced training."""

import json

import pytest

from rft.setup.assembly import Job
from tests.helpers import file_rows, numbers

HEAD = """\
{%- if tools %}<|im_start|>{{ tools | length }}<|im_end|>{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role[0] }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% set f = call.function %}CALL{% endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>a{% endif -%}"""
CALLS = {
    "hermes": '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>',
    "glm": "<tool_call>{{ f.name }}{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>",
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
}
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "d",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def learn_calls(resolved, tmp_path, format):
    """Trains a model on dialogues that call the calculator. Returns the folder of its export."""
    (tmp_path / "chat.jinja").write_text(HEAD.replace("CALL", CALLS[format]))
    with (tmp_path / "rows.jsonl").open("w") as file:
        for n in range(2000):
            one, other = 7919 * n % 90 + 10, 104729 * n % 90 + 10
            function = {"name": "calculate", "arguments": json.dumps({"expression": f"{one}*{other}"})}
            messages = [
                {"role": "user", "content": f"{one}*{other}="},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": str(one * other)},
                {"role": "assistant", "content": str(one * other)},
            ]
            file.write(json.dumps({"messages": messages, "tools": json.dumps([TOOL])}) + "\n")
    config = resolved(
        "algorithm=sft", "algorithm/source=conversation", "data.train_on=assistant", "steps=150", "eval.every=0",
        f"data.template={tmp_path / 'chat.jinja'}", f"output_dir={tmp_path / 'sft'}", "data.eval=null",
    )  # fmt: skip
    config["data"]["train"] = file_rows(tmp_path / "rows.jsonl")
    tokens = config["actor"]["tokenizer"]
    tokens["_target_"] = f"{tokens['_target_']}_and_tokens"
    tokens["special"] = ["<|im_start|>", "<|im_end|>", *MARKS[format]]
    tokens["alphabet"] = '0123456789*={}":, acelnmrguxpsiot'
    Job(config).fit("")
    return tmp_path / "sft" / "checkpoints" / "latest" / "actor"


def tool_run(folder):
    """Overrides of a run of the built-in tool task with an exported model."""
    return (
        "data=products", "environment=calculator", "warmup=none", "actor=hf", f"actor.path={folder}",
        "data.template=chat", "steps=4", "eval.every=4", "eval.at_start=false", "batch.prompts=8",
        "algorithm.group_size=4", "trajectories.every=1", "rollout.max_new_tokens=64", "data.eval.heldout.count=16",
    )  # fmt: skip


def check_calls(run):
    """The model called the calculator in the format, and read its results; some answers were better than others."""
    *_, last = rows = numbers(run)
    assert last["eval/heldout/accuracy"] > 0.5 and last["episode/tool_calls"] > 0.5
    assert max(row.get("grad_norm", 0.0) for row in rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("format", sorted(CALLS))
def test_the_tool_task_trains_in_the_format_of_its_template(format, resolved, tmp_path):
    folder = learn_calls(resolved, tmp_path, format)
    Job(resolved(*tool_run(folder), f"output_dir={tmp_path / 'run'}")).fit("")
    check_calls(tmp_path / "run")
