"""Finds the trained parts of a conversation in one rendering of all its messages, for any chat template."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from rft.data.encode.base import Messages, Template, TrainOn
from rft.data.encode.fates import EARLIER, MARKED, MARKS, REWRITES, TRAINED
from rft.data.encode.parts import SHOWN, asked

Message = dict[str, Any]
OTHERS = ("id", "index", "timestamp", "created_at")  # numbers of a message that are no marks
NO_WORDS = ("role", "name", *MARKS, *OTHERS)  # keys of a message that templates write no answer of
# Why a conversation has nothing to train on.
REWRITTEN = (
    "the template rewrites its last answer or the text before it, such as a thought that the generation prompt begins "
    "and the template then drops; give the answer as a text, which trains unchanged, or the path of a template that "
    "keeps answers"
)
NO_ANSWER = "no message is an answer of the assistant that trains; remove the row"

NO_THOUGHT = re.compile(r"<(\w+)>\s*</\1>\s*")  # as templates of thinking models write it


class Turn(NamedTuple):
    """A turn of the assistant in the render of a conversation: the characters [start, end), and what a token counts."""

    start: int
    end: int
    weight: float = 1.0


def trained_turns(
    chat: Template,
    tools: list[dict[str, Any]] | None,
    messages: Messages,
    number: int,
    train_on: TrainOn,
    scored: bool,
    begun: tuple[int, str] | None,
) -> tuple[str, list[Turn] | None, list[str]]:
    """What of a conversation trains.

    Args:
        tools, begun: see `answers`.
        number: of the first message of the response.
        train_on: see `rft.data.encode.encoder.Encoder`.
        scored: see `check_turns`.

    Returns:
        The text; the turns that train, or None where all of it does; and what becomes of each answer, see `FATES`.

    Raises:
        ValueError: the conversation cannot train.
    """
    first = 0 if train_on == "assistant" else number
    text, turns = answers(chat, tools, messages, first, train_on == "last", begun)
    if train_on == "all":
        check_unmarked(messages)
        return text, None, []
    places, fates = check_turns(turns, messages, chat, scored)
    if scored and places[-1] == turns[-1] and messages[-1]["role"] == "assistant":
        text = text[: places[-1].end]
    return text, places, fates


def answers(
    chat: Template,
    tools: list[dict[str, Any]] | None,
    messages: Messages,
    first: int,
    last: bool = False,
    begun: tuple[int, str] | None = None,
) -> tuple[str, list[Turn | str]]:
    """Renders a conversation once, and finds the assistant's turns in it.

    Let A be the prompt that sampling would read before the turn, and B the turn as the template renders it when it is
    the last message, up to its end token. The turn is unchanged if the rendering begins with A + B. Otherwise the
    template has rewritten the turn or the text before it: templates of thinking models drop earlier thoughts, and some
    move the system message to the last question. Such a turn must not train, because the model never reads or writes
    this text. A turn behind the last question, such as a call of a tool, trains if the rendering has it without an
    empty thought that A ends or B begins with: templates of thinking models write one before the last message alone.

    Args:
        tools: schemas that the template renders, or None.
        first: index of the first message that may train.
        last: of the turns that may train, the last one alone does.
        begun: number of a message that its prompt begins, and the text of this prompt, where there is one.

    Returns:
        The text, and for every turn of the assistant that follows another role's message its place, or a key of
        `CAUSES`.

    Raises:
        ValueError: a mark has an unknown value, the template leaves out the calls of an answer, or an answer that would
            train has neither a content nor calls.
    """

    def render(some: Messages, answering: bool) -> str:
        return chat.render(some, tools, answering)

    chat.check_calls(messages)
    check_words(messages, first)
    text = render(messages, False)
    question = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    turns: list[Turn | str] = []
    for number in asked(messages):
        weight = weight_of(messages[number])
        if number < first or not weight:
            turns.append(EARLIER if number < first else MARKED)
            continue
        prompt = begun[1] if begun is not None and number == begun[0] else render(messages[:number], True)
        alone = text if number == len(messages) - 1 else render(messages[: number + 1], False)
        forms = []
        if alone.startswith(prompt):
            turn = alone[len(prompt) :]
            turn = turn[: chat.length(turn)]
            forms = [(prompt, turn), *_without_thought(prompt, turn)] if number > question else [(prompt, turn)]
        places = [Turn(len(start), len(start + turn), weight) for start, turn in forms if text.startswith(start + turn)]
        turns.append(places[0] if places else REWRITES)
    able = [number for number, turn in enumerate(turns) if turn not in (EARLIER, MARKED)]
    for number in able[:-1] if last else ():
        turns[number] = EARLIER
    return text, turns


def check_words(messages: Messages, first: int) -> None:
    """Refuses answers that would train and say nothing, of which a template writes what it likes, or fails.

    Args:
        first: index of the first message that may train.

    Raises:
        ValueError: names the message and the cure.
    """
    for number in asked(messages):
        message = messages[number]
        said = [value for key, value in message.items() if key not in NO_WORDS and value is not None and value != []]
        if number >= first and not said and weight_of(message):
            raise ValueError(
                f"message {number}, an answer of the assistant, has neither content nor tool_calls to train on; "
                "write its text, or remove it"
            )


def check_turns(
    turns: Sequence[Turn | str], messages: Messages, chat: Template, scored: bool = False
) -> tuple[list[Turn], list[str]]:
    """The turns that train, of those that `answers` gives, and what becomes of each; see `FATES`.

    Args:
        scored: the model is trained on a score of the whole conversation.

    Raises:
        ValueError: the conversation cannot train.
    """
    answered = messages[-1]["role"] == "assistant"
    places = [turn for turn in turns if isinstance(turn, Turn)]
    if not places or (answered and turns[-1] == REWRITES):
        question = next((str(message["content"]) for message in messages if message["role"] == "user"), "")
        problem = REWRITTEN + chat.cure if REWRITES in turns else NO_ANSWER
        raise ValueError(f"data.template={chat.name}: in the conversation that begins {question[:SHOWN]!r} {problem}")
    if scored and any(turn.weight != 1 for turn in places):
        raise ValueError(
            f"a message of the assistant has a weight ({', '.join(MARKS)}) that is not 0 or 1, and a score is of the "
            "whole row; remove it, or give the row a weight: algorithm.source.weight"
        )
    return places, [TRAINED if isinstance(turn, Turn) else turn for turn in turns]


def _without_thought(prompt: str, turn: str) -> Iterator[tuple[str, str]]:
    """A prompt and its turn without the empty thought that one of them has where they meet."""
    if found := NO_THOUGHT.match(turn):
        yield prompt, turn[found.end() :]
    if found := re.search(NO_THOUGHT.pattern + r"\Z", prompt):
        yield prompt[: found.start()], turn


def weight_of(message: Mapping[str, Any]) -> float:
    """What a token of a message of the assistant counts in the loss: the number in one of `MARKS`; 0 takes it out.

    Several marks are multiplied.

    Raises:
        ValueError: a mark is no number from 0 on, true or false, or one takes the message out and another does not.
    """
    marks = {name: message[name] for name in MARKS if name in message}
    for name, value in message.items():
        if isinstance(value, int | float) and name not in (*MARKS, *OTHERS):
            _name_unknown(name)
    shown = ", ".join(f"{name}={value!r:.20}" for name, value in marks.items())
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in marks.values()):
        raise ValueError(
            f"a message of the assistant has {shown}: a mark is 0 or false, which takes it out, true, or the weight of "
            "its tokens in the loss, such as 1 or 0.5"
        )
    if len(set(map(bool, marks.values()))) > 1:
        raise ValueError(f"a message of the assistant has {shown}, which differ; keep one of the marks")
    return float(math.prod(marks.values()))


@cache
def _name_unknown(name: str) -> None:
    """Logs once that a number of a message is no mark."""
    logging.getLogger(__name__).warning(
        "Messages of the assistant have a number or a flag %r, which the loss does not read; it reads %s",
        name[:SHOWN], ", ".join(MARKS),
    )  # fmt: skip


def check_unmarked(messages: Messages) -> None:
    """Raises ValueError where a message of the assistant has another weight than 1, and all tokens train."""
    if any(weight_of(message) != 1 for message in messages if message["role"] == "assistant"):
        raise ValueError(
            f"data.train_on=all trains every token alike, and an answer of this row is marked ({', '.join(MARKS)}); "
            "remove the mark"
        )
