"""Tokenizers: one of characters, one that is trained on the data, and any that transformers can load.

All have an end token and a padding token. `AutoTokenizer` restores them after `save_pretrained`.
"""

import tempfile

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rft.data.rows.sources import require
from rft.data.rows.text.json_files import json_lines
from rft.errors import without_code

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"


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
