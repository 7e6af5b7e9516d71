"""The tokens between two answers by the package `renderers` (Prime Intellect), an extra.

The package has chat templates of well-known models as Python code. A renderer also has tokens where the probed suffix
of `TurnTemplate` has none, such as those that close a thought which was cut. It also reads tool calls in forms that no
format of `rft.data.tool_calls` has, such as Gemma 4's.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, get_args

from rft.data.encode.base import RichText, Template
from rft.data.encode.encoder import Encoder
from rft.data.tool_calls import Schema, ToolCall, reads_calls
from rft.data.tool_calls.find_format import TOOLS, CallingTurn
from rft.errors import did_you_mean
from rft.imports import require_package
from rft.rollout.answers import Answer
from rft.rollout.environment.call_format import CallReader, Read
from rft.rollout.environment.turn_template import Message, NoSuffix, Renderer, Tools, TurnTemplate
from rft.sanitize import valid_text

KEY = "environment.renderer"
AUTO = "auto"
NOT_OF_A_TEMPLATE = ("auto", "default", "custom")  # names of the package that stand for no renderer of its own
MARK = "qZanswerZq"  # the text of an answer
# What renderers raise for a tokenizer, an argument or a conversation that they do not take.
REFUSALS = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "question"}
RESULT = {"role": "tool", "content": "result", "name": "f", "tool_call_id": "result000"}
NEXT = {"a message of the user": [USER], "the result of a tool": [RESULT]}


def check_renderer(name: str) -> None:
    """Checks that there is a renderer of this name, or that it is `auto`.

    Raises:
        ValueError: a package is missing, or it has no such renderer; names the key and the cure.
    """
    for package in ("renderers", "httpx"):  # renderers imports httpx and does not declare it
        cure = f"pip install 'rft[renderers]', or set {KEY}=null"
        require_package(package, f"{KEY}={name}: the package {package} is not installed; {cure}")
    known = _names()
    if name != AUTO and name not in known:
        raise ValueError(
            f"{KEY}={name}: the package renderers has none of this name{did_you_mean(name, known)} (known: "
            f"{', '.join(known)}); set one of them, auto or null"
        )


def renderer_of(name: str, chat: Template) -> "PackageRenderer | None":
    """The renderer for the tokenizer and the arguments of a template.

    Args:
        name: as `check_renderer` takes it. `auto`: the renderer that the package has for the name of the tokenizer.

    Returns:
        None if the package has none for this name.

    Raises:
        ValueError: the renderer cannot be built with the tokenizer and the arguments; names the key.
    """
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    chosen = MODEL_RENDERER_MAP.get(chat.tokenizer.name_or_path) if name == AUTO else name
    if chosen is None:
        return None
    try:
        made = create_renderer(chat.tokenizer, config_from_name(chosen), chat_template_kwargs=chat.arguments or None)
    except REFUSALS as error:
        raise ValueError(
            f"{KEY}={name}: the renderer {chosen} cannot be built with the tokenizer and data.template_arguments of "
            f"this run ({_shown(error)}); choose the renderer of the model, or set {KEY}=null"
        ) from error
    return PackageRenderer(f"{KEY}={name}", made)


class PackageRenderer(Renderer, CallReader):
    """A renderer of the package.

    Args:
        title: key and value of the option, for messages.
        renderer: an object of the package.
    """

    def __init__(self, title: str, renderer: Any) -> None:
        self._title = title
        self._renderer = renderer

    def suffix(self, prompt: list[int], answer: list[int], messages: list[Message], tools: Tools) -> list[int] | None:
        """Also None if the renderer drops tokens of the answer, as it does behind an end token in the middle of it."""
        bridge = self._renderer.bridge_to_next_turn(prompt, answer, messages, tools=tools)
        before = [*prompt, *answer]
        if bridge is None or bridge.token_ids[: len(before)] != before:
            return None
        return list(bridge.token_ids[len(before) :])

    def read(self, prompt: Sequence[int], answer: Answer, tools: Mapping[str, Schema], stop: Sequence[str]) -> Read:
        """The text is that of the engine, without special tokens."""
        content, calls = self.calls(prompt, answer.tokens, tools)
        return Read(answer.finish.text if calls else content, content, calls)

    def calls(
        self, prompt: Sequence[int], answer: Sequence[int], tools: Mapping[str, Schema]
    ) -> tuple[str, list[ToolCall | str]]:
        """The content of an answer and its calls, as the package parses them; none of a thought that it finds open.

        For some models it ends a thought at the mark of a call.

        Args:
            prompt, answer: token ids.
            tools: by their names.
        """
        schemas = [tool["function"] for tool in tools.values()]
        try:
            parsed = self._renderer.parse_response(list(answer), tools=schemas, prompt_ids=list(prompt))
        except REFUSALS as error:
            return "", [f"the answer cannot be read ({_shown(error)})"]
        calls = [] if parsed.reasoning_complete is False else [_call(call) for call in parsed.tool_calls]
        return str(parsed.content), calls

    def reads_calls(self, encoder: Encoder) -> bool:
        """Whether the package reads the calls that the chat template of the run writes."""

        def reads(turn: CallingTurn) -> bool:
            prompt, whole = encoder.tokenize([RichText(turn.prompt), RichText(turn.prompt + turn.text)])
            return self.calls(prompt, whole[len(prompt) :], TOOLS)[1] == turn.calls

        assert encoder.chat is not None
        return reads_calls(encoder.chat, reads)

    def check(self, encoder: Encoder, tools: list[list[dict[str, Any]]]) -> None:
        """Checks that the renderer writes what the chat template of the run writes.

        Args:
            encoder: of the run.
            tools: the schemas of each kind of dialogue that has tools.

        Raises:
            ValueError: a token of an opening differs from the chat template's, or one behind an answer from that of
                `TurnTemplate.suffix`; names the key and the first such token.
        """
        kinds: list[Tools] = [None, *([encoder.tools] if encoder.tools else []), *(some for some in tools if some)]
        for messages, some in product(([USER], [SYSTEM, USER]), kinds):
            try:
                expected = list(encoder.tokenize([encoder.render(messages, some, True)])[0])
            except ValueError:  # such as a template without system messages
                continue
            what = f"{' and '.join(message['role'] for message in messages)}, {'with' if some else 'without'} tools"
            try:
                written = self._renderer.render_ids(messages, tools=some, add_generation_prompt=True)
            except REFUSALS as error:
                raise self._refusal(encoder, what, f"it writes nothing ({_shown(error)})") from error
            self._compare(encoder, what, written, expected)
        for what, written, expected in self._suffixes(encoder):
            self._compare(encoder, what, written, expected)

    def _suffixes(self, encoder: Encoder) -> Iterator[tuple[str, list[int], list[int]]]:
        """What stands behind an answer, by the renderer and by the chat template, where both know it."""
        template = TurnTemplate(encoder)
        prompt, answer = _exchange(encoder)
        for (what, messages), end in product(NEXT.items(), (None, *self._renderer.get_stop_token_ids())):
            behind = _suffix(template, messages, end)
            # a stop token that the template does not write is followed by the same as a cut
            if behind is None or (end is not None and behind == _suffix(template, messages, None)):
                continue
            try:
                written = self.suffix(prompt, answer if end is None else [*answer, end], messages, None)
            except REFUSALS as error:
                raise self._refusal(encoder, what, f"it writes nothing ({_shown(error)})") from error
            if written is not None:
                yield f"{what} behind an answer that was {'cut' if end is None else 'ended'}", written, behind

    def _compare(self, encoder: Encoder, what: str, written: list[int], expected: list[int]) -> None:
        """Refuses other tokens than expected."""
        if written == expected:
            return
        place = _first_difference(written, expected)
        own, other = (repr(encoder.decode([ids[place]])) if place < len(ids) else "none" for ids in (written, expected))
        raise self._refusal(encoder, what, f"its token {place} is {own}, that of the template {other}")

    def _refusal(self, encoder: Encoder, what: str, reason: str) -> ValueError:
        assert encoder.chat is not None
        return ValueError(
            f"{self._title} is no renderer of data.template={encoder.chat.name}: in a conversation ({what}) {reason}; "
            f"choose the renderer of the template, set data.template_arguments that both take, or {KEY}=null"
        )


def _call(call: Any) -> ToolCall | str:
    """A call that the package parsed, or why it is none."""
    if call.status == "ok" and isinstance(call.name, str) and isinstance(call.arguments, dict):
        return ToolCall(call.name, valid_text(call.arguments, "a call of a tool"))
    return f"the call cannot be read ({call.status}): {call.raw!r:.60}"


def _names() -> list[str]:
    """The renderers of the package, each for one template."""
    from renderers import RendererConfig

    variants = get_args(get_args(RendererConfig)[0])
    names = {variant.model_fields["name"].default for variant in variants}
    return sorted(names.difference(NOT_OF_A_TEMPLATE))


def _suffix(template: TurnTemplate, messages: list[Message], end: int | None) -> list[int] | None:
    """`TurnTemplate.suffix`; None where it has none."""
    try:
        return list(template.suffix(messages, end))
    except (NoSuffix, ValueError):
        return None


def _exchange(encoder: Encoder) -> tuple[list[int], list[int]]:
    """The tokens of a prompt and of an answer as the template writes it, up to its end: with a thought that is closed,
    where the template writes one. They are cut where the prompt begins a thought in another way."""
    prompt = encoder.render([USER], None, True).text
    whole, _, _ = encoder.render([USER, {"role": "assistant", "content": MARK}], None, False).text.partition(MARK)
    before = prompt[: _first_difference(prompt, whole)]
    [first] = encoder.tokenize([RichText(before)])
    [second] = encoder.continued([RichText(whole[len(before) :] + MARK)], first[-1])
    return list(first), list(second)


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first place at which they differ: the end of the shorter one, if it begins the other."""
    places = (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(places, min(len(one), len(other)))


def _shown(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
