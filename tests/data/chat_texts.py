# ruff: noqa: RUF001  (bars of DeepSeek)
"""Chat templates of well-known models, as their tokenizers have them, written down in short.

`SPECIAL` lists the special tokens of each, the begin token (or None) and the end token first.
"""

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """\
{% for message in messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim \
+ '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# The system message stands in a question that is the last message, and nowhere else.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Of V3; R1 begins the answer with a thought, which the template drops as soon as it is given.
DEEPSEEK = """\
{% set ns = namespace(is_tool=false, is_first=false, is_output_first=true, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{%- set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}\
{%- for tool in message['tool_calls'] %}\
{{ '<｜Assistant｜>' + (message['content'] or '') + '<｜tool▁calls▁begin｜>' if not ns.is_first else '\n' }}\
{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' \
+ tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{%- set ns.is_first = true -%}\
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}\
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}\
{%- set ns.is_tool = false -%}{%- else %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}\
{{ '<｜tool▁outputs▁begin｜>' if ns.is_output_first else '' }}{%- set ns.is_output_first = false %}\
{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}\
{%- endfor -%}\
{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"""

DEEPSEEK_R1 = (
    DEEPSEEK.removesuffix("{{ '<｜Assistant｜>' }}{% endif %}") + "{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

QWEN_TOOLS = """\
{{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
signatures within <tools></tools> XML tags:\n<tools>" }}
{%- for tool in tools %}{{- "\n" + tool | tojson }}{%- endfor %}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\n<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n\
</tool_call><|im_end|>\n" }}"""

QWEN_CALLS = """\
{%- for tool_call in message.tool_calls or [] %}
    {%- if loop.index0 or content %}{{- '\n' }}{%- endif %}
    {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
    {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
    {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
    {{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}"""

# Of Qwen2.5, which quotes arguments that are a text already.
QWEN25_CALLS = QWEN_CALLS.replace("tool_call.arguments if tool_call.arguments is string else ", "")

QWEN_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}"""

QWEN25 = f"""\
{{%- set given = messages[0].role == 'system' %}}
{{{{- '<|im_start|>system\n' }}}}
{{{{- messages[0].content if given else 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}}}
{{%- if tools %}}{{{{- '\n\n' }}}}{QWEN_TOOLS}{{%- else %}}{{{{- '<|im_end|>\n' }}}}{{%- endif %}}
{{%- for message in messages %}}
    {{%- set content = message.content or '' %}}
    {{%- if message.role == "user" or (message.role == "system" and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{{{- '<|im_start|>assistant\n' + content if content or not message.tool_calls else '<|im_start|>assistant' }}}}
        {{%- if message.tool_calls and not content %}}{{{{- '\n' }}}}{{%- endif %}}
        {QWEN25_CALLS}
    {{%- elif message.role == "tool" %}}{QWEN_RESULTS}{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\n' }}}}{{%- endif %}}"""

# Thoughts are kept behind the last question alone, where the last answer always has one, if an empty one.
QWEN3 = f"""\
{{%- if tools %}}
    {{{{- '<|im_start|>system\n' }}}}
    {{%- if messages[0].role == 'system' %}}{{{{- messages[0].content + '\n\n' }}}}{{%- endif %}}
    {QWEN_TOOLS}
{{%- elif messages[0].role == 'system' %}}
    {{{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}}}
{{%- endif %}}
{{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}}
{{%- for message in messages[::-1] %}}
    {{%- set index = (messages|length - 1) - loop.index0 %}}
    {{%- if ns.multi_step_tool and message.role == "user" and not (message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}}
        {{%- set ns.multi_step_tool = false %}}
        {{%- set ns.last_query_index = index %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- set content = message.content if message.content is string else '' %}}
    {{%- if message.role == "user" or (message.role == "system" and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}}
        {{%- if not message.reasoning_content is string and '</think>' in content %}}
            {{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}}
            {{%- set content = content.split('</think>')[-1].lstrip('\n') %}}
        {{%- endif %}}
        {{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}}
            {{{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}}}
            {{{{- content.lstrip('\n') }}}}
        {{%- else %}}{{{{- '<|im_start|>assistant\n' + content }}}}{{%- endif %}}
        {QWEN_CALLS}
    {{%- elif message.role == "tool" %}}{QWEN_RESULTS}{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\n' }}}}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\n\n</think>\n\n' }}}}
    {{%- endif %}}
{{%- endif %}}"""

ZEPHYR = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

LLAMA2 = """\
{% for message in messages %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

# Behind the whole stands the end token of documents, too.
PHI3 = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Of gpt-oss, without its head: the last answer ends in one way, earlier ones in another, calls in a third.
HARMONY = """\
{% for message in messages %}\
{% if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}\
{% elif message.role == 'tool' %}\
{{ '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}\
{% elif message.tool_calls %}{% set call = message.tool_calls[0].function %}\
{{ '<|start|>assistant<|channel|>commentary to=functions.' + call.name + '<|message|>' + call.arguments + '<|call|>' }}\
{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}\
{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

SPECIAL: dict[str, tuple[str | None, ...]] = {
    CHATML: (None, "<|im_end|>", "<|im_start|>"),
    LLAMA3: ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    MISTRAL: ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    GEMMA: ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    DEEPSEEK: (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁end｜>",
    ),
    DEEPSEEK_R1: ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    QWEN25: (None, "<|im_end|>", "<|im_start|>"),
    QWEN3: (None, "<|im_end|>", "<|im_start|>"),
    ZEPHYR: ("<s>", "</s>"),
    LLAMA2: ("<s>", "</s>"),
    HARMONY: (None, "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    PHI3: (None, "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"),
}
