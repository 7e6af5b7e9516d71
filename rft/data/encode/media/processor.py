"""The processor of a model, which turns texts with images, audio or video into what the model reads.

It expands the slot of a medium to as many placeholder tokens as the model has embeddings for the medium.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rft.batch.encoded import EncodedText, MediaFacts, RawText
from rft.data.encode.base import MediaProcessor, Messages, Parts, RichText
from rft.data.encode.media import audio, files
from rft.data.encode.media.audio import open_audio
from rft.data.encode.media.files import Metadata, Video, open_image, open_video
from rft.data.encode.parts import KINDS

if TYPE_CHECKING:  # a type of transformers, whose import is slow
    from transformers import ProcessorMixin

ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}  # of a processor, by the type of a content part
UNSENT = ("video",)  # engines with a processor of their own do not get them
PADDED = ("audio",)  # processors fill them up to a length, and the model leaves out what they have added
NO_VIDEO = "video needs a model that reads it, and the package torchvision"
LITERAL = "<|literal {}|>"  # stands for a placeholder that a text quotes
SIDE = 32  # pixels of the image of the probe
SECONDS = 0.2  # of its audio
FRAMES, RATE = 4, 24.0  # of its video; frames a second of those that a row gives, as transformers has it


class ModelProcessor(MediaProcessor):
    """The processor of a model.

    Args:
        processor: of the model; its tokenizer is that of the policy.
        slots: the slot of each type of media (`image`, `audio`, `video`) that the run accepts.

    Attributes:
        slots: as given.
        placeholders: ids of the tokens that stand for embeddings of media or enclose them, also of types that the run
            does not accept; no text may contain them otherwise.
        columns: names of the columns of tokens that the processor returns beside the ids.
        probe: a short text with one medium of each type, the same on every rank.
        tokenizer: of the policy.
    """

    modules = (audio, files)

    def __init__(self, processor: "ProcessorMixin", slots: Mapping[str, str]) -> None:
        self.tokenizer: PreTrainedTokenizerBase = processor.tokenizer
        self.slots = dict(slots)
        tokens = placeholder_tokens(processor)
        self._markers = {kind: self._marker(slot, tokens[kind]) for kind, slot in slots.items()}
        self._plain = self._processor = processor
        every, media, after = "".join(slots.values()), self._probe_media(), self.tokenizer.eos_token * 3
        one, two = (self._of(text) for text in (RichText(every, media), RichText(every * 2 + after, media * 2)))
        self.placeholders = self._find_placeholders(tokens.values(), one["input_ids"][0].tolist())
        self.columns = _find_columns(one, two)
        self._stacked = _find_stacked(one, two) - {*self.columns}
        self._processor = copy.copy(processor)  # its tokenizer has a token for each quoted placeholder
        self._processor.tokenizer = copy.deepcopy(self.tokenizer)
        quoted = self.tokenizer.convert_ids_to_tokens(self.placeholders)
        self._literals = {token: LITERAL.format(number) for number, token in enumerate(quoted)}
        self._processor.tokenizer.add_tokens(list(self._literals.values()), special_tokens=True)
        self._spelled = {
            self._processor.tokenizer.convert_tokens_to_ids(literal): self.tokenizer(
                token, add_special_tokens=False, split_special_tokens=True
            ).input_ids
            for token, literal in self._literals.items()
        }
        self.probe = self._encoded(one)

    def sample_video(self, fps: float) -> None:
        """Sets the frames of a second of video that the model reads.

        Raises:
            ValueError: the processor takes no video.
        """
        if "video" not in self.slots:
            raise ValueError(f"actor.processor.video_fps={fps:g}: the processor takes no video here; {NO_VIDEO}")
        vars(self._plain.video_processor).update(fps=fps, num_frames=None)

    def _marker(self, slot: str, token: str) -> str:
        """The token in a slot by which it is found in a text."""
        if token in slot:
            return token
        special = [added for added in self.tokenizer.all_special_tokens if added in slot]
        assert special, f"the slot {slot!r} has no special token"
        return special[0]

    def escape(self, text: str) -> str:
        for token, literal in self._literals.items():
            text = text.replace(token, literal)
        return text

    def take_media(self, messages: Messages, as_parts: bool) -> tuple[list[dict[str, Any]], Parts]:
        bare, media = [], []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                content = self.escape(content)
            elif isinstance(content, list):
                parts = [self._bare(part, as_parts) for part in content]
                media += [(part["type"], part[part["type"]]) for part in content if part["type"] != "text"]
                content = parts if as_parts else "".join(part["text"] for part in parts)
            bare.append({**message, "content": content} if "content" in message else dict(message))
        return bare, tuple(media)

    def _bare(self, part: Mapping[str, Any], as_parts: bool) -> dict[str, str]:
        """A content part without its value."""
        kind = part["type"]
        if kind == "text":
            return {"type": kind, "text": self.escape(part["text"])}
        if kind not in self.slots:
            why = f" ({NO_VIDEO})" if kind == "video" else ""
            raise ValueError(
                f"the model takes no {kind}{why}; it takes {', '.join(self.slots)}. Remove the part, or the row"
            )
        return {"type": kind} if as_parts else {"type": "text", "text": self.slots[kind]}

    def count(self, text: str) -> int:
        return sum(1 for _ in self._slots_in(text))

    def _slots_in(self, text: str) -> Iterable[re.Match[str]]:
        return re.finditer("|".join(map(re.escape, set(self._markers.values()))), text)

    def encode(self, rich: RichText) -> EncodedText:
        if self.keeps_raw:
            self._check_sent(rich.media)
        opened = self._opened(rich)
        encoded = self._encoded(self._outputs(rich.text, opened))
        if self.keeps_raw and opened:
            rate = self.sampling_rate if "audio" in opened else 0
            encoded.raw = RawText(self._tokenized(rich.text), opened, rate)
        return encoded

    def _check_sent(self, media: Parts) -> None:
        """Raises a ValueError for media that the engine of the run does not get."""
        kinds = {kind for kind, _ in media}
        if unsent := sorted(kinds & {*UNSENT}):
            raise ValueError(f"the engine gets no {unsent[0]}; set rollout=hf, or remove the row")
        if not self.sends_padded and (padded := sorted(kinds & {*PADDED})):
            raise ValueError(
                f"the engine gets no {padded[0]}: it computes the padding too, and would sample from another "
                "distribution than that which is trained; set rollout=hf, or another engine of docs/media.md"
            )

    def prefixes(self, rich: RichText, cuts: Sequence[int]) -> list[EncodedText]:
        whole = self.encode(rich)
        start = max(match.end() for match in self._slots_in(rich.text))  # no token crosses the end of a slot
        ends = [self._tokenized(rich.text[start:cut]) for cut in cuts]
        size = len(whole) - len(ends[-1])
        if whole[size:] != ends[-1] or any(any(whole.column(name)[size:]) for name in self.columns):
            # such as where a tokenizer drops white space behind a slot
            return [self.encode(RichText(rich.text[:cut], rich.media)) for cut in cuts]
        return [whole.part(0, size) + end for end in ends]

    def _encoded(self, outputs: dict[str, Tensor]) -> EncodedText:
        ids = outputs.pop("input_ids")[0].tolist()
        outputs.pop("attention_mask", None)
        columns = {name: outputs.pop(name)[0].tolist() for name in self.columns}
        literal = {place: self._spelled[token] for place, token in enumerate(ids) if token in self._spelled}
        if literal:
            columns = {
                name: [n for place, n in enumerate(column) for n in [n] * len(literal.get(place, (0,)))]
                for name, column in columns.items()
            }
            ids = self._spell(ids)
        media = {name: tensor[0] if name in self._stacked else tensor for name, tensor in outputs.items()}
        return EncodedText(ids, columns, media or None)

    def _spell(self, ids: list[int]) -> list[int]:
        """The ids with the plain characters of quoted placeholders."""
        return [token for own in ids for token in self._spelled.get(own, [own])]

    def _tokenized(self, text: str) -> list[int]:
        """The token ids of a text with its slots as they are."""
        return self._spell(self._processor.tokenizer(text, add_special_tokens=False).input_ids)

    def _opened(self, rich: RichText) -> dict[str, list[Any]]:
        """The media of a text by their types, as the processor takes them."""
        opened: dict[str, list[Any]] = {}
        for kind, value in rich.media:
            opened.setdefault(kind, []).append(self._open(kind, value))
        if (places := self.count(rich.text)) != len(rich.media):
            raise ValueError(
                f"the rendered text has {places} places for {len(rich.media)} media; data.template writes some of them "
                "not at all, or twice"
            )
        return opened

    def _outputs(self, text: str, opened: Mapping[str, list[Any]]) -> dict[str, Tensor]:
        given: dict[str, Any] = {ARGUMENTS[kind]: media for kind, media in opened.items()}
        if "audio" in opened:
            given["sampling_rate"] = self.sampling_rate
        if "video" in opened:  # a list for each text
            given |= {"videos": [[video.frames for video in opened["video"]]], "do_sample_frames": False}
            given["video_metadata"] = [[dict(video.metadata) for video in opened["video"]]]
        try:
            outputs = self._processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError, ArithmeticError) as error:
            raise ValueError(f"the processor of the model refuses the media of a row: {error}") from error
        return {name: torch.atleast_1d(torch.as_tensor(value)) for name, value in outputs.items()}

    def _of(self, rich: RichText) -> dict[str, Tensor]:
        """What the processor returns for a text."""
        return self._outputs(rich.text, self._opened(rich))

    def _open(self, kind: str, value: Any) -> Any:
        """A medium as the processor takes it."""
        if kind == "image":
            return open_image(value)
        return open_audio(value, self.sampling_rate) if kind == "audio" else self._open_video(value)

    def _open_video(self, value: Any) -> Video:
        """The frames of a video that the model's processor samples; all if its settings state no number or rate."""
        from transformers.video_utils import VideoMetadata

        part = self._processor.video_processor
        settings = vars(part)

        def choose(metadata: Metadata) -> Sequence[int]:
            if settings["fps"] is None and settings["num_frames"] is None and not settings["do_sample_frames"]:
                return range(metadata["total_num_frames"])
            given = {
                name: settings[name] for name in inspect.signature(part.sample_frames).parameters if name in settings
            }
            chosen: Sequence[int] = part.sample_frames(VideoMetadata(**metadata), **given)
            return chosen

        video = open_video(value, choose)
        return video._replace(metadata={"fps": settings["fps"] or RATE} | video.metadata)

    @cached_property
    def sampling_rate(self) -> int:
        """Samples per second of the audio that the model reads."""
        return int(self._processor.feature_extractor.sampling_rate)

    def _find_placeholders(self, tokens: Iterable[str], expanded: list[int]) -> list[int]:
        """The ids of those of these tokens that the tokenizer has, and of the special tokens in expanded slots: some
        models count media by those around their embeddings."""
        vocabulary = self.tokenizer.get_vocab()
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.eos_token_id, self.tokenizer.unk_token_id}
        return sorted({*(vocabulary[token] for token in tokens if token in vocabulary), *(special & {*expanded})})

    def _probe_media(self) -> Parts:
        """One medium of each type."""
        from PIL import Image

        values: dict[str, Callable[[], Any]] = {
            "image": lambda: Image.new("RGB", (SIDE, SIDE)),
            "audio": lambda: {"array": torch.zeros(int(SECONDS * self.sampling_rate)).numpy(),
                              "sampling_rate": self.sampling_rate},
            "video": lambda: np.zeros((FRAMES, SIDE, SIDE, 3), np.uint8),
        }  # fmt: skip
        return tuple((kind, values[kind]()) for kind in self.slots)

    @cached_property
    def facts(self) -> MediaFacts:
        refused = [kind for kind in KINDS if kind not in self.slots or kind in UNSENT]
        return MediaFacts(refused, self.placeholders, self.probe, self._stacked, self.save)

    def save(self, folder: Path) -> None:
        self._plain.save_pretrained(folder)


def _find_columns(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The outputs that have one number for each token, by two texts; the longer one is not twice as long.

    Args:
        one, two: outputs of a text with one medium of each type, and of a text with two, and more tokens behind them.
    """
    return tuple(
        name
        for name in one
        if name not in ("input_ids", "attention_mask")
        and all(output[name].shape == output["input_ids"].shape for output in (one, two))
    )


def _find_stacked(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> frozenset[str]:
    """The outputs (1, n, ...) of the n media of a text; others begin with n, or with what n media have in all."""
    names = one.keys() - {"input_ids", "attention_mask"}
    return frozenset(name for name in names if len(one[name]) == len(two[name]) == 1)


def placeholder_tokens(processor: "ProcessorMixin") -> dict[str, str]:
    """The token that stands for the embeddings of each type of media that the processor names, taken here or not."""
    tokens = {kind: vars(processor).get(f"{kind}_token") for kind in KINDS}
    return {kind: str(token) for kind, token in tokens.items() if token is not None}


def slots_of_template(processor: "ProcessorMixin", kinds: Sequence[str]) -> dict[str, str]:
    """What the chat template of a processor writes for each type of media; its placeholder where it has no template."""
    slots = {}
    for kind in kinds:
        slots[kind] = placeholder_tokens(processor)[kind]
        if processor.chat_template is not None:
            parts = [{"type": "text", "text": "before"}, {"type": kind}, {"type": "text", "text": "behind"}]
            text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
            slots[kind] = text.partition("before")[2].partition("behind")[0]
    return slots
