"""Encodes rows as token ids: prompts, and supervised examples that begin with exactly the tokens of the prompt.

The ids are `EncodedText`: with a processor they have media and columns of tokens. Whether prompts leave room for an
answer is checked elsewhere, where the length of an answer is known.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rft.batch.encoded import EncodedText, MediaFacts
from rft.batch.thoughts import PromptThoughts
from rft.data.encode.base import MediaProcessor, Messages, Parts, RichText, Template, TrainOn, refuse_media
from rft.data.encode.fates import text_fates
from rft.data.encode.parts import SHOWN, beginning, conversation, join, no_prompt, text_of
from rft.data.encode.tokenizer import Continuation, UnknownCharacters
from rft.data.encode.truncation import Overlong, PromptLimit, TextLimit
from rft.data.rows.lazy import Rows, located, place
from rft.data.text import read_text
from rft.imports import import_part

Example = tuple[EncodedText, list[float]]  # T tokens, and what each of them counts in the loss


class Encoder:
    """Turns rows into token ids.

    Args:
        tokenizer: supplied.
        template: "none": the prompt is the text, after a BOS token if the tokenizer adds one. Any other name: a
            `templates.ChatTemplate`; the prompt ends with its generation prompt.
        system: system message for chats that have none, or null.
        tools: a json file with a list of tool schemas for rows without `tools`, or null.
        train_on: which tokens train: the response of a row; every turn of the assistant, also those in the prompt; the
            last of these turns; or every token.
        arguments: variables of the template, see `templates.ChatTemplate`.
        limit: what happens to long prompts, or None if they have no limit.
        processor: of a model that takes media, or None.
        scored: a row ends with the end token of its last answer, from which the model reads a score.

    Attributes:
        text_limit: what happens to long given texts; None until they are counted.
        limit, processor: as given.
        chat: the template; None if it is "none".
        tools: the schemas of `tools`.
        continued: the tokens of texts that continue another one; see `Continuation`.
        ends: the tokens that answers are trained to end with, see `Template`; `end` is that of plain answers.
        answers: counts those in examples by what becomes of them, see `fates.FATES`; None: nothing is counted.
        thoughts: finds the thoughts that prompts open.
        unknown: finds characters without a token; a source that trains on given texts has it check them.
        made_of: everything that the token ids of a row depend on beside the files that `save` writes.

    Raises:
        ValueError: the tokenizer has no end token, or the template takes no arguments, system message or tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        system: str | None,
        tools: str | None = None,
        train_on: TrainOn = "response",
        arguments: Mapping[str, Any] = MappingProxyType({}),
        limit: PromptLimit | None = None,
        processor: MediaProcessor | None = None,
        scored: bool = False,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token): an answer could never end; add one")
        for key, value in (("system", system), ("tools", tools), ("template_arguments", arguments or None)):
            if template == "none" and value is not None:
                raise ValueError(
                    f"data.{key} has no effect with data.template=none; set data.template=chat or remove it"
                )
        self._tokenizer, self.thoughts = tokenizer, PromptThoughts(tokenizer)
        self.chat: Template | None = None
        if template != "none":
            make = import_part("rft.data.encode.templates", "ChatTemplate", f"data.template={template}")
            self.chat = make(tokenizer, template, arguments)
        self.ends = (tokenizer.eos_token_id,) if self.chat is None else self.chat.ends
        self.end = self.ends[0]
        self._system, self._train_on, self._scored = system, train_on, scored
        self.tools: list[dict[str, Any]] | None = None
        if tools is not None and self.chat is not None:
            self.tools = self.chat.schemas(read_text(tools, "data.tools"), f"data.tools={tools}")
        begin = tokenizer.bos_token_id
        begins = template == "none" and begin is not None and tokenizer("a").input_ids[:1] == [begin]
        self._prefix = EncodedText([begin] if begins else [])
        self.text_limit: TextLimit | None = None
        self.answers: Counter[str] | None = None
        self.limit, self.processor, self.unknown = limit, processor, UnknownCharacters(tokenizer, scored)
        self.continued = Continuation(tokenizer, self.tokenize)
        cut = limit if limit is not None and limit.cuts else None
        self.made_of = (template, system, self.tools, train_on, dict(arguments), cut, scored)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer and the processor, whose files decide the token ids of a text."""
        self._tokenizer.save_pretrained(folder)
        if self.processor is not None:
            self.processor.save(folder)

    @property
    def media_facts(self) -> MediaFacts | None:
        """What models and engines know of the processor; None without one."""
        return None if self.processor is None else self.processor.facts

    def prompts(self, rows: Rows) -> list[EncodedText]:
        """The prompt tokens of each row, cut by `limit`. Its `prompt` is a text, or chat messages `{role, content}`.

        Raises:
            ValueError: a prompt is empty, longer than `limit` accepts, or not what the template takes; names the place
                of the row.
        """
        prompts, limit = self.whole_prompts(rows), self.limit
        if limit is None:
            return prompts
        for number, prompt in enumerate(prompts):
            if limit.refuses(len(prompt)):
                with located(rows, number):
                    self._limited(prompt, rows[number])
        return [limit.cut_prompt(prompt) for prompt in prompts]

    def whole_prompts(self, rows: Rows) -> list[EncodedText]:
        """`prompts` without `limit`."""
        if not rows:
            return []
        texts = []
        for number, row in enumerate(rows):
            with located(rows, number):
                texts.append(self._prompt(row, "the prompt"))
        prompts = [self._begun(ids) for ids in self.tokenize(texts, lambda number: located(rows, number))]
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"{place(rows, number)}: the prompt is empty; remove the row")
            self.unknown.warn(texts[number].text, prompt, place(rows, number))
        return prompts

    def prompt(self, row: Mapping[str, Any]) -> EncodedText:
        """`prompts` of one row, whose place is not known."""
        return self._limited(self.whole_prompt(row), row)

    def whole_prompt(self, row: Mapping[str, Any]) -> EncodedText:
        """`prompt` without `limit`."""
        [ids] = self.tokenize([self._prompt(row, "the prompt")])
        if not self._begun(ids):
            raise ValueError("the prompt is empty; remove the row")
        return self._begun(ids)

    def _begun(self, ids: EncodedText) -> EncodedText:
        """Tokens behind the BOS token, if texts have one: a text that begins with it has it once."""
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def _limited(self, prompt: EncodedText, row: Mapping[str, Any]) -> EncodedText:
        limit = self.limit
        if limit is not None and limit.refuses(len(prompt)):
            raise ValueError(f"the prompt (it begins {beginning(row['prompt'])!r}) has {limit.refusal(len(prompt))}")
        return prompt if limit is None else limit.cut_prompt(prompt)

    def example(self, row: Mapping[str, Any]) -> tuple[EncodedText, list[bool]]:
        """`weighted_example` with T flags that are True where the token trains; a weight but 0 and 1 is refused."""
        ids, weights = self.weighted_example(row)
        if not {*weights} <= {0, 1}:
            raise ValueError("a message of the assistant has a weight, which this source of batches does not read")
        return ids, list(map(bool, weights))

    def weighted_example(self, row: Mapping[str, Any], overlong: Overlong | None = None) -> Example:
        """A supervised row, from its `response` and, unless the response is the whole text, its `prompt`.

        A text after a prompt trains unchanged, followed by `end` unless it ends with it. A list of chat messages is
        rendered together with the prompt; the turns that `train_on` names train, each up to its end token. A text
        without a prompt trains from its second token on, since nothing predicts the first. The tokens before a trained
        part are the ones that the model would read when sampling.

        Args:
            overlong: what happens to a longer text than `text_limit` allows; None: as `text_limit` has it.

        Returns:
            T ids, and T weights: what each token counts in the loss, 0 where it does not train.

        Raises:
            ValueError: response or prompt are of another type, the template rewrites the answer, or the text is too
                long.
        """
        ids, weights = self._cut(row, *self._example(row))
        ids = self._cut_text(ids, overlong)
        return ids, weights[: len(ids)]

    def _cut_text(self, ids: EncodedText, overlong: Overlong | None = None) -> EncodedText:
        limit = self.text_limit
        return ids if limit is None else limit.cut(ids, overlong or limit.overlong)

    def _cut(self, row: Mapping[str, Any], ids: EncodedText, weights: list[float]) -> Example:
        """The example with the prompt as `prompts` gives it."""
        if self.limit is None or row.get("prompt") is None:
            return ids, weights
        whole = self.whole_prompt(row)
        cut = self._limited(whole, row)
        if len(cut) == len(whole):
            return ids, weights
        size = len(whole)
        if ids[:size] != whole:
            raise ValueError(
                f"data.truncation={self.limit.truncation}: the row that begins {beginning(row['prompt'])!r} does not "
                "begin with the tokens of its prompt alone, so the prompt cannot be cut; set data.truncation=drop"
            )
        ids, weights = cut + ids.part(size, len(ids)), self.limit.cut(weights[:size]) + weights[size:]
        return ids, [0.0, *weights[1:]]  # nothing predicts the first token

    def _example(self, row: Mapping[str, Any]) -> Example:
        response, prompt = row["response"], row.get("prompt")
        if self._train_on == "assistant" and self.chat is not None and isinstance(prompt, list):
            response = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        if isinstance(response, list):
            return self._conversation(row, prompt, response)
        if not isinstance(response, str):
            raise ValueError(
                f"a response is {type(response).__name__}, not text or a list of chat messages; name another field in "
                f"columns.response of the data set"
            )
        if prompt is None and self.chat is not None:
            raise ValueError(
                f"data.template={self.chat.name}: a text without a prompt cannot be a chat; set "
                f"data.template=none (it begins {response[:SHOWN]!r})"
            )
        before = RichText("") if prompt is None else self._prompt(row, "a prompt")
        whole = RichText(before.text + self._escape(response), before.media)
        head, tail = self._pieces(whole, (len(before.text), len(whole.text)))
        tail = tail if tail[-1:] == [self.end] else tail + EncodedText([self.end])
        begins = tail if prompt is None else head
        head = head if begins[: len(self._prefix)] == self._prefix else self._prefix + head
        if not head and (prompt is not None or len(tail) < 2):
            raise ValueError(f"a {'text' if prompt is None else 'prompt'} is empty; remove the row")
        ids = head + tail
        if prompt is None or self._train_on == "all":
            return ids, [0.0] + [1.0] * (len(ids) - 1)
        if self.answers is not None:
            self.answers.update(text_fates(prompt))
        return ids, [0.0] * len(head) + [1.0] * len(tail)

    def steps(self, row: Mapping[str, Any], steps: Sequence[str], separator: str) -> tuple[EncodedText, list[int]]:
        """Encodes an answer in steps. Each step and the separator after it are tokenized separately, as in TRL.

        Args:
            row: has a `prompt`.
            steps: the texts of the steps.

        Returns:
            T ids, and the position of the last token of every step that they hold, which belongs to the separator.

        Raises:
            ValueError: there are no steps, a step is not a text or has no tokens, or the answer is too long.
        """
        if not isinstance(steps, list | tuple) or not steps or not all(isinstance(step, str) for step in steps):
            raise ValueError(f"steps: expected a list of texts, got {steps!r:.{SHOWN}}")
        ids, ends = self.prompt(row), []
        end = self.encode([separator])[0]
        for step in self.encode(list(steps)):
            if not step + end:
                raise ValueError("a step is empty, and the tokenizer has no token for the separator; choose another")
            ids = ids + step + end
            ends.append(len(ids) - 1)
        self.unknown.check({**row, "response": steps}, ids, [0.0] * len(ids))  # steps are read, and do not train
        ids = self._cut_text(ids)
        return ids, [place for place in ends if place < len(ids)]

    def encode(self, texts: list[str]) -> list[EncodedText]:
        """The tokens of texts that continue another one, without template and BOS token."""
        return self.continued([RichText(self._escape(text)) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def tokenize(
        self, texts: Sequence[RichText], where: Callable[[int], AbstractContextManager] = nullcontext
    ) -> list[EncodedText]:
        """The tokens of rendered texts; an error in a text is raised in the context `where` of its number."""
        if self.processor is None:
            plain = [rich.text for rich in texts]
            found = self._tokenizer(plain, add_special_tokens=False, return_attention_mask=False).input_ids
            return [EncodedText(ids) for ids in found]
        encoded = []
        for number, rich in enumerate(texts):
            with where(number):
                encoded.append(self.processor.encode(rich))
        return encoded

    def _escape(self, text: str) -> str:
        return text if self.processor is None else self.processor.escape(text)

    def _conversation(self, row: Mapping[str, Any], prompt: Any, response: list[Any]) -> Example:
        if self.chat is None:
            raise ValueError("a response is a list of chat messages, which needs a chat template; set data.template")
        question = [] if prompt is None else self._prompt_messages(prompt, "a prompt")
        question, answer, start = join(question, conversation(response, "a response"))
        messages, media = self._without_values(self._with_system([*question, *answer]))
        number, chat, tools = len(messages) - len(answer), self.chat, self._tools_of(row)
        begun = None if start is None else (number, self._chat_prompt([*question, start], tools).text)
        trained_turns = import_part("rft.data.encode.masks", "trained_turns", f"data.template={chat.name}")
        text, turns, fates = trained_turns(chat, tools, messages, number, self._train_on, self._scored, begun)
        rich = RichText(text, media)
        if turns is None:
            ids = self.tokenize([rich])[0]
            return ids, [0.0] + [1.0] * (len(ids) - 1)
        if self.answers is not None:
            self.answers.update(fates)
        pieces = self._pieces(rich, [*(cut for turn in turns for cut in (turn.start, turn.end)), len(rich.text)])
        counts = [*(count for turn in turns for count in (0.0, turn.weight)), 0.0]
        weights = [count for count, piece in zip(counts, pieces, strict=True) for _ in piece]
        return sum(pieces, EncodedText([])), weights

    def _pieces(self, rich: RichText, cuts: Iterable[int]) -> list[EncodedText]:
        """The tokens of a text between cuts, each piece tokenized with the text before it if that keeps its tokens.

        The first piece has all media of the text, which ends with the last cut.
        """
        cuts = list(cuts)
        texts = [self._between(rich, 0, cut) for cut in cuts]
        if self.processor is not None and rich.media and len(texts[0].media) == len(rich.media):
            whole = self.processor.prefixes(rich, cuts)
        else:
            whole = self.tokenize(texts)
        pieces: list[EncodedText] = []
        tokens: list[int] = []
        done = 0
        for cut, up_to_cut in zip(cuts, whole, strict=True):
            if up_to_cut[: len(tokens)] == tokens:
                piece = up_to_cut.part(len(tokens), len(up_to_cut))
            else:
                [piece] = self.continued([self._between(rich, done, cut)], tokens[-1])
            pieces.append(EncodedText(piece, piece.columns))
            tokens = tokens + piece
            done = cut
        pieces[0].media = whole[-1].media
        return pieces

    def _between(self, rich: RichText, start: int, end: int) -> RichText:
        """The text between two characters, with the media in it."""
        if not rich.media:
            return RichText(rich.text[start:end])
        assert self.processor is not None
        first, last = (self.processor.count(rich.text[:cut]) for cut in (start, end))
        return RichText(rich.text[start:end], rich.media[first:last])

    def _prompt(self, row: Mapping[str, Any], what: str) -> RichText:
        prompt = row["prompt"]
        if self.chat is not None:
            return self._chat_prompt(self._prompt_messages(prompt, what), self._tools_of(row))
        if isinstance(prompt, str):
            return RichText(self._escape(prompt))
        rich = self.render(self._prompt_messages(prompt, what), None, True)
        if not rich.media or len(prompt) > 1:
            raise ValueError(f"{what} is a list of chat messages; set data.template=chat")
        return rich

    def _chat_prompt(self, messages: Messages, tools: list[dict[str, Any]] | None) -> RichText:
        assert self.chat is not None
        bare, media = self._without_values(self._with_system(messages))
        return RichText(self.chat.prompt(bare, tools), media)

    def render(self, messages: Messages, tools: list[dict[str, Any]] | None, answering: bool) -> RichText:
        """The text of chat messages and their media: as `Template.render` gives it, without `data.system`; with
        template "none" their contents."""
        bare, media = self._without_values(messages)
        if self.chat is None:
            return RichText("".join(text_of(message.get("content")) for message in bare), media)
        return RichText(self.chat.render(bare, tools, answering), media)

    def _without_values(self, messages: Messages) -> tuple[list[dict[str, Any]], Parts]:
        """Messages as the template renders them, and the media in them."""
        if self.processor is None:
            return refuse_media(messages), ()
        return self.processor.take_media(messages, self.chat is not None and self.chat.takes_parts)

    def _prompt_messages(self, prompt: Any, what: str) -> list[dict[str, Any]]:
        if not isinstance(prompt, str | list):
            raise no_prompt(prompt, what)
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else conversation(prompt, what)

    def _with_system(self, messages: Messages) -> Messages:
        if self._system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = row.get("tools")
        assert self.chat is not None
        return self.chat.schemas(tools, "the field tools of a row") if tools else self.tools
