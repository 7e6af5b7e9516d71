"""Writes a tokenizer into a GGUF file: byte-level BPE whose way to split text llama.cpp has under a name."""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rft.actor.loading.gguf_facts import OFFSETS, SPLITS

OTHER = "choose a model with a byte-level BPE as that of Llama 3, Qwen2 or SmolLM"
PLAIN = {  # of a BPE model
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (False,),
    "byte_fallback": (False,),
}


def add_tokenizer(writer: GGUFWriter, folder: Path, rows: int) -> list[str]:
    """Writes the tokenizer of a folder, with its chat template and the tokens that end a text.

    Args:
        rows: of the embedding; tokens that the tokenizer lacks become unused ones.

    Returns:
        What llama.cpp does otherwise than the tokenizer, a sentence each.

    Raises:
        ValueError: llama.cpp has no such tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder}: no tokenizer can be read ({reason}); copy its files there") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{folder}: a {type(tokenizer).__name__} is no fast tokenizer; {OTHER}")
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(stated, folder))
    texts, types = _tokens(tokenizer, stated["added_tokens"], rows, folder)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in stated["model"]["merges"]])
    writer.add_add_space_prefix(False)
    starts, ends = _added_around(tokenizer, folder)
    writer.add_add_bos_token(starts)
    writer.add_add_eos_token(ends)
    notes = _add_special_tokens(writer, tokenizer, folder)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template is not None:
        writer.add_chat_template(template)
    else:
        notes.append("the tokenizer has no chat template; llama.cpp takes one of its own for messages")
    if stated["normalizer"] is not None:
        notes.append("the tokenizer composes Unicode (NFC), llama.cpp does not; decomposed text gets other tokens")
    return notes


def _split_name(stated: dict[str, Any], folder: Path) -> str:
    """llama.cpp's name for how a tokenizer splits text.

    Args:
        stated: the tokenizer as tokenizer.json has it.

    Raises:
        ValueError: it has none, or another normalizer or kind of model.
    """
    model, first, splitter = stated["model"], stated["normalizer"], stated["pre_tokenizer"] or {"type": "none"}
    if model["type"] != "BPE":
        raise ValueError(f"{folder}: the tokenizer is a {model['type']}; {OTHER}")
    if odd := [key for key, values in PLAIN.items() if model[key] not in values]:
        raise ValueError(f"{folder}: the tokenizer has {odd[0]}={model[odd[0]]}, which to-gguf does not write; {OTHER}")
    if first is not None and first["type"] != "NFC":
        raise ValueError(
            f"{folder}: the tokenizer has the normalizer {first['type']}, which to-gguf does not write; {OTHER}"
        )
    steps = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    plain = [{key: value for key, value in step.items() if key != OFFSETS} for step in steps]
    name = next((name for name, way in SPLITS.items() if way == (plain, model["ignore_merges"])), None)
    if name is None:
        raise ValueError(
            f"{folder}: the tokenizer splits text by {json.dumps(splitter)} (ignore_merges={model['ignore_merges']}), "
            f"which is none of {', '.join(SPLITS)}; {OTHER}"
        )
    return name


def _tokens(
    tokenizer: PreTrainedTokenizerBase, added: list[dict[str, Any]], rows: int, folder: Path
) -> tuple[list[str], list[TokenType]]:
    """The texts and types of all rows of the embedding."""
    texts, types = [f"[PAD{number}]" for number in range(rows)], [TokenType.UNUSED] * rows
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[last] >= rows:
        raise ValueError(
            f"{folder}: the token {last!r} has the id {vocabulary[last]}, and the model {rows} embeddings; one of the "
            "two belongs to another model"
        )
    for text, number in vocabulary.items():
        texts[number], types[number] = text, TokenType.NORMAL
    for token in added:
        if odd := [key for key in ("lstrip", "rstrip", "single_word") if token[key]]:
            raise ValueError(
                f"{folder}: the token {token['content']!r} has {odd[0]}, which to-gguf does not write; {OTHER}"
            )
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    return texts, types


def _added_around(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[bool, bool]:
    """Whether a text gets the token that begins one, and whether the one that ends it."""
    plain, whole = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    for starts in (False, True):
        for ends in (False, True):
            if [tokenizer.bos_token_id] * starts + plain + [tokenizer.eos_token_id] * ends == whole:
                return starts, ends
    raise ValueError(
        f"{folder}: the tokenizer makes {whole} of 'a', and llama.cpp adds only bos and eos to {plain}; name the "
        "tokens as bos_token and eos_token in tokenizer_config.json"
    )


def _add_special_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Writes the tokens with a part of their own, and those that end a text, of which a file has at most three."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: the tokenizer has no eos_token; name the one that ends a text in its config")
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    file = folder / "generation_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ends = [end for end in (named if isinstance(named, list) else [named]) if end not in (None, tokenizer.eos_token_id)]
    for end, add in zip(ends, (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
        add(end)
    left = tokenizer.convert_ids_to_tokens(ends[2:])
    return [f"a file has three tokens that end a text; left out: {', '.join(left)}"] if left else []
