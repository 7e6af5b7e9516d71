"""The tokens that a chat template writes between two sampled answers, found without rendering the whole dialogue.

The template renders a short conversation with a marker in place of its last answer. What it writes behind the marker is
what it writes behind an answer of any dialogue, unless it depends on earlier messages. `TurnTemplate` tests that once
for each sequence of roles, on conversations of several kinds.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rft.batch.encoded import EncodedText
from rft.data.encode.base import RichText
from rft.data.encode.encoder import Encoder
from rft.data.encode.parts import conversation
from rft.data.encode.templates import PROBE, THOUGHT

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
MARK = "qZanswerZq"  # stands for an answer


def _say(role: str, content: str = "text", **more: Any) -> Message:
    return {"role": role, "content": content, **more}


USER, ANSWER = _say("user"), _say("assistant")


class NoSuffix(Exception):
    """The tokens between two answers depend on more than the messages between them. The text is the reason."""


class Renderer(ABC):
    """Has the tokens between two answers for one chat template. It is asked before the probed suffix of `TurnTemplate`.

    `rft.rollout.environment.renderers` has those of the package `renderers`.
    """

    @abstractmethod
    def suffix(self, prompt: list[int], answer: list[int], messages: list[Message], tools: Tools) -> list[int] | None:
        """The tokens behind an answer, up to the next one; None if they are unknown.

        Args:
            prompt: the token ids before the answer.
            answer: its token ids, with its end token if it has one. It may have been cut anywhere.
            messages: of roles `user` and `tool`, with texts as contents.
            tools: schemas of functions.
        """


@dataclass(frozen=True)
class Seam:
    """Where a suffix begins in the text behind the marker, for messages of some roles.

    Attributes:
        start: the token with which it begins behind an answer without an end token; "" if it is the whole text; None if
            it is unknown.
        behind: by the id of an end token that the answer has, the token behind which it begins.
        calls: the template writes the calls of the answer, and a message is the result of one.
    """

    start: str | None
    behind: dict[int, str]
    calls: bool


class TurnTemplate:
    """Encodes the messages between two sampled answers, for one tokenizer and chat template.

    Args:
        encoder: of the run.
        renderer: is asked first for the tokens between two answers, if there is one.
    """

    def __init__(self, encoder: Encoder, renderer: Renderer | None = None) -> None:
        self._encoder = encoder
        self._renderer = renderer
        self._added = {} if encoder.chat is None else encoder.chat.added
        self._token = re.compile("|".join(map(re.escape, sorted(self._added.values(), key=len, reverse=True))))
        self._seams: dict[tuple[tuple[str, ...], bool], Seam | str] = {}

    def opening(self, messages: list[Message], tools: Tools = None) -> EncodedText:
        """The first prompt of a dialogue, as `Encoder.prompts` gives it.

        Args:
            messages: with `data.template=none` one message, whose content is the prompt.
            tools: schemas of functions; None for those of `data.tools`.

        Raises:
            ValueError: as for `Encoder.prompt`.
        """
        return self._encoder.prompt(self._row(messages, tools))

    def rendered(self, messages: list[Message], tools: Tools = None) -> EncodedText:
        """The prompt of a dialogue that has answers, all of it encoded again. It may have any length."""
        return self._encoder.whole_prompt(self._row(messages, tools))

    def continuation(
        self, prompt: EncodedText, start: int, messages: list[Message], end: int | None, tools: Tools = None
    ) -> EncodedText:
        """The tokens between the last answer of a dialogue and the next one: the renderer's, else those of `suffix`.

        Args:
            prompt: all tokens of the dialogue. Only `suffix` knows dialogues with media.
            start: of the answer in them.
            messages, end, tools: as for `suffix`, which also has the errors.
        """
        texts = prompt.media is None and all(isinstance(message["content"], str) for message in messages)
        if self._renderer is not None and texts:
            given = tools or self._encoder.tools
            found = self._renderer.suffix(prompt[:start], prompt[start:], messages, given)
            if found is not None:
                return EncodedText(found)
        return self.suffix(messages, end, tools)

    def suffix(self, messages: list[Message], end: int | None, tools: Tools = None) -> EncodedText:
        """The tokens between a sampled answer and the next one: what the template writes behind an answer, the
        messages, and the generation prompt. With `data.template=none` the contents of the messages alone.

        Args:
            messages: of the environment. Those of role `tool` are the results of the answer's calls, one each.
            end: the last token of the answer; None if sampling was cut. The suffix continues behind it if it is an end
                token of the template, and begins with one otherwise.
            tools: as for `opening`.

        Raises:
            NoSuffix: the template writes something else behind other conversations, or tokens depend on the answer.
            ValueError: the template ignores messages of a role; names `data.template`.
        """
        messages = _with_ids(conversation(messages, "the messages of an environment"))
        if self._encoder.chat is None:
            return self._encoder.continued([self._encoder.render(messages, None, True)], end)[0]
        seam = self._seam(tuple(message["role"] for message in messages), bool(tools or self._encoder.tools))
        rich = self._behind([USER], _answer(messages, seam.calls), messages)  # tools change nothing behind the marker
        assert rich is not None
        text, token = rich.text, self._added.get(end) if end is not None else None
        if end in seam.behind:
            text = text.partition(seam.behind[end])[2]
        elif seam.start is None:
            raise NoSuffix("the answer has no end token")
        else:
            text = text[text.index(seam.start) :]
        if token is not None:  # tokens behind it may depend on it
            ids = self._encoder.tokenize([RichText(token + text, rich.media)])[0]
            if ids[:1] == [end]:
                return ids.behind(1)
        elif self._token.match(text):
            return self._encoder.tokenize([RichText(text, rich.media)])[0]
        raise NoSuffix("the template ends answers without a special token")

    def _row(self, messages: list[Message], tools: Tools) -> Message:
        if self._encoder.chat is None and not tools and len(messages) == 1 and isinstance(messages[0]["content"], str):
            return {"prompt": messages[0]["content"]}
        return {"prompt": messages, "tools": tools}

    def _seam(self, roles: tuple[str, ...], with_tools: bool) -> Seam:
        key = roles, with_tools
        if key not in self._seams:
            try:
                self._seams[key] = self._find_seam(roles, with_tools)
            except NoSuffix as reason:
                self._seams[key] = str(reason)
        found = self._seams[key]
        if isinstance(found, str):
            raise NoSuffix(found)
        return found

    def _find_seam(self, roles: tuple[str, ...], with_tools: bool) -> Seam:
        messages = _with_ids([_say(role, f"qZmessage{number}Zq") for number, role in enumerate(roles)], name="f")
        calls, text = self._first_rendered(messages, (True, False) if "tool" in roles else (False,))
        for message in messages:
            if message["content"] not in text:
                raise self._ignored(message)
        if any(other != text for other in self._other_texts(messages, calls, [PROBE] if with_tools else None)):
            raise NoSuffix(f"{', '.join(roles)}: the template writes something else behind other conversations")
        closing = self._token.findall(text[: text.index(messages[0]["content"])])
        behind = {token: shown for token, shown in self._added.items() if shown in closing}
        if calls:
            usual = self._first_token([USER])
            return Seam(usual if usual in closing else None, behind, calls)
        last = self._first_token([])
        if last not in closing and closing[:1] == [self._first_token([ANSWER])]:
            # the template ends the last answer with another token than earlier ones
            behind |= {token: closing[0] for token, shown in self._added.items() if shown == last}
        return Seam("", behind, calls)

    def _first_token(self, messages: list[Message]) -> str | None:
        """The first added token that the template writes behind an answer that is a text, if there is one."""
        try:
            found = self._behind([USER], _answer([], False), messages)
        except ValueError:
            return None
        token = found and self._token.search(found.text)
        return token[0] if token else None

    def _first_rendered(self, messages: list[Message], tried: Sequence[bool]) -> tuple[bool, str]:
        """Whether the answer that the template renders has calls, and what it writes behind the marker."""
        refusal = None
        for calls in tried:
            try:
                if found := self._behind([USER], _answer(messages, calls), messages):
                    return calls, found.text
            except ValueError as error:
                refusal = error
        if refusal is not None:
            raise NoSuffix(str(refusal))
        raise self._ignored(ANSWER)

    def _ignored(self, message: Message) -> ValueError:
        assert self._encoder.chat is not None
        return ValueError(
            f"data.template={self._encoder.chat.name} does not write the text of messages of role {message['role']}; "
            "choose a template that does"
        )

    def _other_texts(self, messages: list[Message], calls: bool, tools: Tools) -> Iterator[str]:
        """What the template writes behind the marker in other conversations, where it renders them."""
        [result] = _with_ids([_say("tool")], name="f")
        called = [USER, _answer([result], True, "text"), result]
        histories = [[USER], [USER, ANSWER, USER], [_say("system"), USER], [USER, ANSWER | THOUGHT, USER], called]
        histories.append([*called, ANSWER, USER])
        answer = _answer(messages, calls)
        for history, last, given in product(histories, (answer, answer | THOUGHT), (None, tools)):
            try:
                if found := self._behind(history, last, messages, given):
                    yield found.text
            except ValueError:
                continue

    def _behind(
        self, history: list[Message], answer: Message, messages: list[Message], tools: Tools = None
    ) -> RichText | None:
        """What the template writes behind the marker in an answer between a history and messages; None if it does not
        write the marker.

        Raises:
            ValueError: the template cannot render it.
        """
        rich = self._encoder.render([*history, answer, *messages], tools, bool(messages))
        _, found, text = rich.text.partition(MARK)
        return RichText(text, rich.media) if found else None


def _with_ids(messages: list[Message], **named: str) -> list[Message]:
    """The messages; results of calls have an id, by which templates find the call, and what is `named`."""
    return [
        {"tool_call_id": f"result{number:03}", **named, **message} if message["role"] == "tool" else message
        for number, message in enumerate(messages)
    ]


def _answer(messages: list[Message], calls: bool, ends: str = MARK) -> Message:
    """An answer before the messages: a text, or the calls whose results they are. It ends with `ends`, as far as the
    template lets it: in the last argument of the last call."""
    results = [message for message in messages if message["role"] == "tool"]
    if not calls or not results:
        return _say("assistant", ends)
    made = []
    for number, result in enumerate(results, 1):
        given = {"x": ends if number == len(results) else "value"}
        function = {"name": result.get("name", "f"), "arguments": given}
        made.append({"id": result["tool_call_id"], "type": "function", "function": function})
    return _say("assistant", "", tool_calls=made)
