# ruff: noqa: RUF001  (bars of DeepSeek)
"""What parsers of other packages read of the answers of the table, and where they differ from what the table says."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rft.data.tool_calls import TOOL_CALLS, ToolCall
from tests.data.tool_calls.table import FORMS, Case, cases, untyped

# Tokens that the packages look up in tokenizers of the models, beside the marks of calls.
TOKENS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_response>"),
    *("</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "[gMASK]", "<sop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
    *("<|im_middle|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "[EOS]"),
    *("<|eot_id|>", "<|eom_id|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)


def tokenizer(form: str, end: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that has the special tokens of models.

    Args:
        form: of calls; Mistral's older tokenizers, which write lists, lack the mark of later ones.
        end: the token that ends answers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token=end)
    marks = TOOL_CALLS.build({"name": FORMS[form].format}, "name").facts.marks
    special = [token for token in (*TOKENS, *marks) if not (form == "mistral list" and token == "[ARGS]")]
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def differences(forms: list[str], read: Callable[[str, Case], list[ToolCall] | str]) -> dict[tuple[str, str], object]:
    """What another parser reads where it is not what the table says; calls that cannot be read are left out there.

    Args:
        read: an answer in a form; its calls, or the name of the error that it raised.
    """
    found: dict[tuple[str, str], object] = {}
    for form in forms:
        for name, case in cases(FORMS[form]).items():
            calls = read(form, case)
            if calls != [call for call in case.calls if isinstance(call, ToolCall)]:
                found[form, name] = calls
    return found


def differing_values(
    form: str, read: Callable[[str, dict[str, dict[str, Any]]], list[dict[str, Any]]]
) -> dict[str, object]:
    """The values that another parser reads where the table has another one, by their names.

    Args:
        read: the arguments of the calls of a text, for tools.
    """
    found: dict[str, object] = {}
    for name, tools, text, value in untyped(form):
        calls = read(text, tools)
        if repr(calls) != repr([] if value is str else [{"x": value}]):
            found[name] = calls[0]["x"] if calls else None
    return found
