"""Chat templates: the tokenizer's own, one of the folder `chat_templates` by name, or a file of the user."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rft.data.encode import masks
from rft.data.encode.base import Messages, Template
from rft.data.strict_json import value_of
from rft.data.text import read_text
from rft.errors import did_you_mean, prefixed
from rft.sanitize import one_line

if TYPE_CHECKING:  # worker processes of reward rules start without transformers
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "chat_templates"
# What transformers passes to every template, beside the special tokens of the tokenizer.
PASSED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
THINKS = "enable_thinking"  # an argument of many templates: the generation prompt begins a thought
QUESTION, ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
THOUGHT = {"reasoning_content": "thought", "thinking": "thought"}  # of an answer, by the names that templates read
RESULT = {"role": "tool", "content": "result", "tool_call_id": "result000"}
PROBE = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


class ChatTemplate(Template):
    """Renders conversations. The tokenizer keeps the template, so that checkpoints have it.

    Args:
        tokenizer: supplied.
        name: "chat" for the tokenizer's own, the name of one that is built in, or the path of a file in jinja.
        arguments: variables of the template beside the messages, such as `{enable_thinking: False}`.

    Raises:
        ValueError: there is no such template, it does not render, does not read an argument, or its tokens are not
            the tokenizer's.
    """

    modules = (masks,)

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", name: str, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.name = name
        self._end_text = ""  # of the token `end`
        self._open_ends: dict[bool, str] = {}  # marks that end answers, and answers that call tools; see `_mark_behind`
        self._probes = False  # calls are rendered as they are
        self._wraps = False  # a text is rendered as the part {type: text, text: ...}: the template takes no other
        self.arguments: dict[str, Any] = {}
        self.tokenizer = tokenizer
        if name != "chat":
            tokenizer.chat_template = _read(name)
        elif tokenizer.chat_template is None:
            raise ValueError(
                f"data.template=chat: the tokenizer has no chat template; set data.template=none, the path of a file "
                f"or one of {', '.join(_built_in())}"
            )
        asked = [QUESTION]
        if "question" not in self.render(asked, None, True):
            self._wraps = True
            if "question" not in self.render(asked, None, True):
                raise ValueError(f"data.template={name} does not write the content of a message; choose another")
        self.arguments = self._checked_arguments(arguments)
        prompt = self.render(asked, None, True)
        self.takes_tools = self.render(asked, [PROBE], True) != prompt
        self.takes_parts = self._renders_parts(asked)
        self.added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        self.special = {
            token: self.added[token] for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        special = sorted({*tokenizer.all_special_tokens, *self.special.values()}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)))
        self._end_text = self._find_end()
        ends = (self._end_text or tokenizer.eos_token, self._find_call_end())
        self.ends: tuple[int, ...] = tuple(tokenizer.convert_tokens_to_ids([end for end in ends if end]))
        if name in _built_in() and not self._special.match(self._tail):
            raise ValueError(
                f"data.template={name} ends an answer with {self._tail.strip()!r}, which is no special token of this "
                "tokenizer; choose the template that the model was trained with, such as its own: data.template=chat"
            )

    def prompt(self, messages: Messages, tools: list[dict[str, Any]] | None) -> str:
        continued = messages[-1]["role"] == "assistant"
        if continued and messages[-1].get("tool_calls"):
            raise ValueError("a prompt ends with tool calls of the assistant; add their results")
        return self.render(messages, tools, True, continued)

    def render(
        self, messages: Messages, tools: list[dict[str, Any]] | None, answering: bool, continued: bool = False
    ) -> str:
        last = messages[-1]
        answered = last["role"] == "assistant" and not answering
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    [self._prepared(message) for message in messages],
                    tools=tools,
                    add_generation_prompt=answering and not continued,
                    continue_final_message=continued,
                    tokenize=False,
                    **self.arguments,
                )
            )
            return text + self._open_ends.get(bool(last.get("tool_calls")), "") if answered else text
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"data.template={self.name} cannot render a conversation of {one_line(roles)}: {one_line(str(error))}; "
                "correct the row or choose another data.template"
            ) from error

    def schemas(self, tools: Any, what: str) -> list[dict[str, Any]]:
        if isinstance(tools, str):  # tables can hold schemas of different rows only as text
            with prefixed(f"{what} is not JSON: "):
                tools = value_of(tools)
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError(f"{what}: expected a list of tool schemas as {{type: function, function: ...}}")
        if not self.takes_tools:
            raise ValueError(
                f"{what}: data.template={self.name} ignores tools, so the model would not see them; choose a "
                "template that renders them, such as chatml, or remove them"
            )
        return tools

    def _renders_parts(self, asked: list[dict[str, Any]]) -> bool:
        parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in asked]
        try:
            return self.render(parts, None, True) == self.render(asked, None, True)
        except ValueError:
            return False

    def length(self, turn: str) -> int:
        """The end token is the first special token after a plain answer. In a turn that ends in another way, such as
        with a tool call, it is the last special token."""
        plain = turn.endswith(self._tail)
        ends = list(self._special.finditer(turn, len(turn) - len(self._tail) if plain else 0))
        if not ends:
            raise ValueError(
                f"data.template={self.name} does not end answers with a special token of the tokenizer, so a "
                "model trained with it would not stop; give answers as texts, which end with the tokenizer's end "
                "token, or the path of a template that ends them with {{ eos_token }}"
            )
        return ends[0 if plain else -1].end()

    @cached_property
    def cure(self) -> str:
        """How plain answers in messages train; empty where they do, and where no argument of the template lets them.

        Where the generation prompt begins a thought, an answer without one does not continue it.
        """
        without: dict[str, Any] = {THINKS: False}
        if THINKS not in _variables(self.tokenizer) or self._continues({}) or not self._continues(without):
            return ""
        return f"; for answers without thoughts set +data.template_arguments.{THINKS}=false"

    def _continues(self, changes: dict[str, Any]) -> bool:
        """Whether a plain answer begins with the generation prompt, with some arguments changed."""
        try:
            prompt, whole = (
                self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=answering, tokenize=False, **self.arguments | changes
                )
                for messages, answering in (([QUESTION], True), ([QUESTION, ANSWER], False))
            )
        except TemplateError:
            return False
        return str(whole).startswith(str(prompt))

    def _checked_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        known = sorted(_variables(self.tokenizer)) if arguments else []
        for argument in arguments:
            if argument not in known:
                raise ValueError(
                    f"data.template_arguments.{argument}: data.template={self.name} does not read it"
                    f"{did_you_mean(argument, known)} (it reads: {', '.join(known) or 'none'})"
                )
        return dict(arguments)

    @property
    def writes_calls(self) -> bool:
        return self._call_form != "none"

    def check_calls(self, messages: Messages) -> None:
        if any(message.get("tool_calls") for message in messages) and not self.writes_calls:
            raise ValueError(
                f"data.template={self.name} does not write calls of tools, and a message of the assistant has "
                "tool_calls; choose a template that writes them, such as chatml, or write the calls as content"
            )

    def _prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as the template takes it: the arguments of its calls are objects or their JSON texts, and an
        answer has no end token.

        Raises:
            ValueError: arguments are no JSON object.
        """
        changed: dict[str, Any] = {}
        if message.get("tool_calls") and not self._probes:
            form = _as_text if self._call_form == "text" else _as_object
            changed["tool_calls"] = [_with_arguments(call, form) for call in message["tool_calls"]]
        content = message.get("content")
        if isinstance(content, str):
            if message.get("role") == "assistant":
                content = content.removesuffix(self._end_text)
            changed["content"] = [{"type": "text", "text": content}] if self._wraps else content
        return {**message, **changed}

    @cached_property
    def _call_form(self) -> Literal["object", "text", "none"]:
        """How the template takes the arguments of a call: as an object; as a JSON text, where it writes an object as
        Python does, or not at all; "none" where it leaves out calls."""
        self._probes, texts = True, {}
        probes: tuple[dict[str, Any] | str, ...] = ({"x": "value"}, '{"x": "value"}')
        for form, arguments in zip(("object", "text"), probes, strict=True):
            try:
                texts[form] = self.render([QUESTION, _calls(1, arguments)], None, False)
            except ValueError:
                continue
        self._probes = False
        if "value" in texts.get("object", "") and "{'x'" not in texts["object"]:
            return "object"
        if "value" in texts.get("text", ""):
            return "text"
        return "none" if texts else "object"  # a template that renders neither says why

    def _find_end(self) -> str:
        """The first special token after a plain answer, else the one that the next message begins with; or empty."""
        try:
            found = self._special.search(self._tail)
        except ValueError:  # of a template without answers
            return ""
        if not self._tail:
            self._tail, call_end = self._mark_behind(ANSWER, QUESTION), self._mark_behind(_calls(1, {}), RESULT)
            self._open_ends = {False: self._tail, True: call_end}
            return self._tail
        return "" if found is None else found[0]

    def _find_call_end(self) -> str:
        """The special token that ends a turn that calls tools, as `length` finds it; empty for that of a plain answer.

        Engines stop at it, so empty, too, if it stands elsewhere in a turn: between two calls, or behind a thought.
        """
        for number in (2, 1):  # some templates take one call alone
            try:
                prompt = self.render([QUESTION], None, True)
                answer = self.render([QUESTION, ANSWER | THOUGHT], None, False).removeprefix(prompt)
                turn = self.render([QUESTION, _calls(number, {})], None, False).removeprefix(prompt)
                length = self.length(turn)
            except ValueError:
                continue
            end = [found[0] for found in self._special.finditer(turn, endpos=length)][-1]
            return end if end not in answer and turn.count(end) == 1 and not turn[length:].strip() else ""
        return ""

    def _mark_behind(self, answer: Mapping[str, Any], following: Mapping[str, Any]) -> str:
        """The special token with which the next message begins right behind an answer; empty without one.

        It ends the answer where the template writes no end token, as GLM-4.5's does.
        """
        try:
            text = self.render([QUESTION, answer], None, False)
            longer = self.render([QUESTION, answer, following], None, False)
        except ValueError:
            return ""
        found = self._special.match(longer, len(text)) if longer.startswith(text) else None
        return "" if found is None else found[0]

    @cached_property
    def _tail(self) -> str:
        """The text that the template adds after the last answer."""
        return self.render([QUESTION, ANSWER], None, False).rpartition("answer")[2]


def _calls(number: int, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """A turn that calls a tool `number` times."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": f"result{index:03}", "type": "function", "function": function} for index in range(number)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_arguments(call: Mapping[str, Any], form: Callable[[Any, str], Any]) -> Mapping[str, Any]:
    """A call, also one without the key `function`, with its arguments in a form."""
    if not isinstance(call, Mapping):
        raise ValueError(
            f"a call of a tool is {call!r:.60}; expected {{type: function, function: {{name, arguments}}}}"
        )
    function = call.get("function", call)
    function = {**function, "arguments": form(function.get("arguments"), str(function.get("name")))}
    return {**call, "function": function} if "function" in call else function


def _as_object(arguments: Any, name: str) -> Any:
    """The arguments of a call as an object. OpenAI's format has a JSON text.

    Raises:
        ValueError: a text is no JSON object.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = value_of(arguments)
    except ValueError as error:
        raise ValueError(f"the arguments of a call of {name} are no JSON ({error}): {arguments!r:.60}") from error
    if not isinstance(value, dict):
        raise ValueError(f"the arguments of a call of {name} are no JSON object: {arguments!r:.60}")
    return value


def _as_text(arguments: Any, name: str) -> str:
    """The arguments of a call as a JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _variables(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """The variables of a tokenizer's template, without those that every template gets."""
    own = tokenizer.chat_template
    jinja = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    names = set()
    for text in own.values() if isinstance(own, dict) else [own]:
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)  # a tag that only transformers knows
        names |= meta.find_undeclared_variables(jinja.parse(plain))
    return names - PASSED - {*jinja.globals, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES}


def _built_in() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def _read(name: str) -> str:
    known = _built_in()
    path = FOLDER / f"{name}.jinja" if name in known else Path(name).expanduser()
    if not path.is_file():
        known = ["none", "chat", *known]
        raise ValueError(
            f"data.template={name}: no such file and no built-in template of this name{did_you_mean(name, known)} "
            f"(known: {', '.join(known)})"
        )
    return read_text(str(path), "data.template")
