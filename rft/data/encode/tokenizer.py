"""Tokenizers: one of characters, one that is trained on the data, and any that transformers can load.

All have an end token and a padding token. `AutoTokenizer` restores them after `save_pretrained`. What tokenizers differ
in: some have no token for a character (`UnknownCharacters`), some write a blank before a text (`Continuation`).
"""

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rft.batch.encoded import EncodedText
from rft.data.encode.base import RichText
from rft.data.encode.parts import SHOWN
from rft.errors import without_code
from rft.imports import import_part

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
BLANKS = ("▁", "Ġ")  # how tokens of Metaspace and of byte-level tokenizers begin that stand for a blank
NEUTRAL = ("\n", "=", "a", "0")  # a tokenizer may drop one of them, or merge it with the text


def characters(*, alphabet: str) -> PreTrainedTokenizerBase:
    """One token per character, for tasks with a small alphabet.

    Args:
        alphabet: every character of the task; any other becomes <unk>.
    """
    return characters_and_tokens(alphabet=alphabet, special=[])


def characters_and_tokens(*, alphabet: str, special: list[str]) -> PreTrainedTokenizerBase:
    """`characters` with further special tokens, such as the placeholders of media.

    Args:
        alphabet: every character of the task; any other becomes <unk>.
        special: the tokens. Their ids begin with 3, after those of <pad>, <eos> and <unk>.
    """
    if not alphabet:
        raise ValueError("actor.tokenizer.alphabet is empty: list every character of the task")
    tokens = dict.fromkeys([PAD, END, UNKNOWN, *special, *alphabet])
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = _wrap(tokenizer, unk_token=UNKNOWN)
    if special:
        made.add_special_tokens({"additional_special_tokens": special})
    return made


def bpe(*, files: list[str], fields: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Byte-level BPE in the manner of GPT-2, trained on jsonl files; every digit is a token of its own.

    Training is deterministic: every rank gets the same tokenizer from the same files.

    Args:
        files: jsonl files.
        fields: the fields of their rows that hold text.
        vocab_size: maximal number of tokens, including the 256 bytes, <pad> and <eos>.

    Raises:
        ValueError: a file or a field is missing, or the size is too small for the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        raise ValueError(
            f"actor.tokenizer.vocab_size={vocab_size} cannot hold the bytes; give at least {len(alphabet) + 2}"
        )
    require = import_part("rft.data.rows.sources", "require", "actor.tokenizer.fields")
    json_lines = import_part("rft.data.rows.text_files", "json_lines", "actor.tokenizer.files")
    texts = []
    for number, file in enumerate(files):
        for where, row in json_lines(file, f"actor.tokenizer.files[{number}]"):
            for field in fields:
                require(row, field, where, "set actor.tokenizer.fields to the fields that hold text")
                texts.append(str(row[field]))
    if not texts:
        raise ValueError("actor.tokenizer.files and actor.tokenizer.fields hold no text to train a tokenizer on")
    tokenizer = Tokenizer(models.BPE())
    digits, text = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def pretrained(*, path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model on disk or on the hub. If it has no padding token, the end token pads.

    Args:
        path: folder, or name on the hub.
        trust_remote_code: python files of the path may run, where the tokenizer needs them.

    Raises:
        ValueError: no tokenizer can be loaded from `path`.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = without_code(error, "actor", str(error))
        raise ValueError(f"actor.tokenizer.path={path}: cannot load a tokenizer ({reason})") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _wrap(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False, **special
    )


class UnknownCharacters:
    """Finds characters without a token in texts: to the model, texts that differ in them alone are equal.

    It finds them by the unknown token, which stands for all of them.

    Args:
        tokenizer: of the texts. One whose unknown token ends or pads texts, too, as of byte-level BPE, has a token for
            every character.
        scored: a score is trained on texts, and no answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scored: bool = False) -> None:
        self._scored = scored
        unknown = tokenizer.unk_token_id
        others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        self._unknown = None if unknown in others else unknown
        self._tokenizer = tokenizer
        self._said = False

    def warn(self, text: str, ids: Sequence[int], where: str) -> None:
        """Logs the first character that has no token, once.

        Args:
            text: with the tokens `ids`.
            where: the place of the row.
        """
        if not self._said and self._unknown in ids and (shown := self._first([text])):
            self._said = True
            logging.getLogger(__name__).warning(
                "%s: the tokenizer has no token for %s, which becomes %s, so texts that differ in such characters "
                "alone are equal; other rows with such characters are not named",
                where, shown, self._tokenizer.unk_token,
            )  # fmt: skip

    def check(self, row: Mapping[str, Any], ids: Sequence[int], weights: Sequence[float]) -> None:
        """Refuses an answer with such a character, and logs one that does not train, as `warn`.

        Args:
            row: with the fields `prompt` and `response`.
            ids: T tokens.
            weights: T weights, 0 where a token does not train.

        Raises:
            ValueError: names the character and the cure.
        """
        if self._unknown not in ids:
            return
        prompt, response = row.get("prompt"), row["response"]
        trains = not self._scored and any(
            weight and token == self._unknown for token, weight in zip(ids, weights, strict=True)
        )
        if trains and (shown := self._first(_texts([response, prompt]))):
            raise ValueError(
                f"the tokenizer has no token for {shown} of an answer, which would train {self._tokenizer.unk_token}; "
                "remove the row, or choose a tokenizer that has the character"
            )
        text = "".join(_texts([prompt, response]))
        self.warn(text, ids, f"the row that begins {text[:SHOWN]!r}")

    def _first(self, texts: Iterable[str]) -> str | None:
        """The first character without a token, as messages show it; None where the template alone has such."""
        text = "".join(texts)
        for special in self._tokenizer.all_special_tokens:  # the unknown token itself may stand in a text
            text = text.replace(special, "")
        characters = list(dict.fromkeys(text))
        tokens = self._tokenizer(characters, add_special_tokens=False).input_ids if characters else []
        unknown = (one for one, ids in zip(characters, tokens, strict=True) if self._unknown in ids)
        return next((f"{one!r} (U+{ord(one):04X})" for one in unknown), None)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, at every depth, but for the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from () if name == "role" else _texts(item)


class Continuation:
    """Tokenizes texts that continue another one, without the blank that some tokenizers write before a text.

    Tokenizers in the manner of SentencePiece (Llama 2, Mistral, T5) turn `Yes` into `▁Yes`: a text begins with a word.
    Behind the tokens of `2+2=` that would be a blank that no text has. Such a tokenizer gets the text behind a neutral
    one, whose tokens are cut off.

    Args:
        tokenizer: of the run. One that writes no blank before a text gets the texts as they are.
        tokenize: the tokens of texts that stand alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokenize: Callable[[Sequence[RichText]], list[EncodedText]]
    ) -> None:
        self._tokenize = tokenize
        first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False).input_ids[:1])
        self._writes_blank = any(token.startswith(BLANKS) for token in first)
        self._added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}

    def __call__(self, texts: Sequence[RichText], behind: int | None = None) -> list[EncodedText]:
        """The tokens of each text.

        Args:
            behind: the token before the text, behind which the tokenizer may begin a word: an added one. None, or
                another token: the text continues a text.
        """
        if not self._writes_blank:
            return self._tokenize(texts)
        before = NEUTRAL if behind not in self._added else (self._added[behind],)
        heads = self._tokenize([RichText(text) for text in before])
        return [self._cut(rich, list(zip(before, heads, strict=True))) for rich in texts]

    def _cut(self, rich: RichText, neutrals: Sequence[tuple[str, EncodedText]]) -> EncodedText:
        """The tokens of a text behind the first of some texts that keeps its own tokens; alone if none does."""
        for before, head in neutrals:
            [whole] = self._tokenize([RichText(before + rich.text, rich.media)])
            if head and whole[: len(head)] == head:
                return whole.behind(len(head))
        return self._tokenize([rich])[0]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig) -> None:
    """Checks that a checkpoint restores the tokenizer that it was saved with.

    For some architectures `AutoTokenizer` loads another class than the one that was saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if loaded.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"actor.model_config.model_type={model_config.model_type}: for this type transformers would load a "
            f"{type(loaded).__name__} instead of this tokenizer; choose another type, such as qwen3 or llama"
        )
