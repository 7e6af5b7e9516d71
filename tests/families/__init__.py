"""Tiny random models of images and audio, each with the real processor class of its family, made without any file.

`family("llava")` builds one. Sizes are small, structures are those of the family: its kinds of vision layers, its
rotary sections, its tiles. The tokenizer has one token per character.
"""

import copy
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from rft.data.encode.media.without_video import video_part, without_video
from rft.data.encode.tokenizer import characters

ROLES = ["<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1]}  # of 8 dimensions a head: time, height, width
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
}
PATCHES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}  # 4 to 16 tokens
SPECTRA = {"feature_size": 8, "chunk_length": 1}  # 100 frames: up to 25 tokens


@dataclass(frozen=True)
class Family:
    """A family of models: a tiny configuration and a processor that fits it.

    Attributes:
        name: of the configuration, `config.model_type`.
        kinds: of media that the model reads, "image", "audio" and "video".
        placeholders: per kind, the id of the token that stands for the media in `input_ids`.
    """

    name: str
    config: PreTrainedConfig
    processor: Any
    kinds: tuple[str, ...]
    placeholders: Mapping[str, int]

    def model(self, seed: int = 0) -> PreTrainedModel:
        """A model in eval mode. Its weights are large enough that every input changes the logits."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForMultimodalLM.from_config(copy.deepcopy(self.config))  # a model writes into its own
            for weight in model.parameters():
                if weight.ndim > 1:
                    nn.init.normal_(weight, std=0.15)
        return model.eval()

    def render(self, *content: str, answer: str | None = None) -> str:
        """A chat by the template: one question of parts, "image", "audio" or a text, and an answer or its header."""
        parts = [{"type": part} if part in ("image", "audio") else {"type": "text", "text": part} for part in content]
        messages = [{"role": "user", "content": parts}]
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None)


def picture(seed: int, width: int = 16, height: int = 16) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sound(seed: int, samples: int = 3200) -> np.ndarray:
    """Audio of random samples at 16000 a second."""
    return np.random.default_rng(seed).standard_normal(samples).astype(np.float32)


def frames(seed: int, count: int = 4) -> np.ndarray:
    """A video of random pixels, (count, 16, 16, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)


def family(name: str) -> Family:
    """Builds a new family, whose configuration and processor a test may change."""
    return FAMILIES[name]()


def _tokenizer(special: list[str], **named: str) -> PreTrainedTokenizerFast:
    """One token per character, the special tokens of a family, and names for some of them."""
    plain = characters(alphabet=string.printable)
    plain.add_special_tokens({"additional_special_tokens": [*ROLES, *special]})
    known = {"pad_token": plain.pad_token, "eos_token": plain.eos_token, "unk_token": plain.unk_token}
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        extra_special_tokens=named or [*ROLES, *special],
        clean_up_tokenization_spaces=False,
        **known,
    )


def _template(**media: str) -> str:
    """A chat template in the form of ChatML; `media` has the text of an image and of an audio."""
    cases = "".join(f"{{% elif part['type'] == '{kind}' %}}{text}" for kind, text in media.items())
    parts = f"{{% for part in message['content'] %}}{{% if 'text' in part %}}{{{{ part['text'] }}}}{cases}{{% endif %}}"
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}" + parts + "{% endfor %}{% endif %}"
        "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _text(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TEXT | ends | {"vocab_size": len(tokenizer)} | changes


def _family(name: str, config: Any, processor: Any, **placeholders: str) -> Family:
    ids = {kind: processor.tokenizer.convert_tokens_to_ids(token) for kind, token in placeholders.items()}
    processor.tokenizer.chat_template = processor.chat_template
    return Family(name, config, processor, tuple(placeholders), ids)


def _qwen_vl(
    name: str, config: type, processor: type, vision: dict[str, Any], rope: dict[str, Any], **changes: Any
) -> Family:
    tokenizer = _tokenizer(VISION)
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION)
    text = _text(tokenizer, rope_parameters=SECTIONS | rope, **changes)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    patches = {"depth": 2, "num_heads": 2, "patch_size": PATCHES["patch_size"]}
    parts = {
        "image_processor": transformers.Qwen2VLImageProcessorPil(**PATCHES),
        "tokenizer": tokenizer,
        "video_processor": video_part("Qwen2VLVideoProcessor", patch_size=PATCHES["patch_size"], merge_size=2),
        "chat_template": _template(image="<|vision_start|><|image_pad|><|vision_end|>"),
    }
    made = config(text_config=text, vision_config=patches | vision, **ids)
    return _family(name, made, without_video(processor)(**parts), image="<|image_pad|>")


def _qwen2_vl() -> Family:
    vision = {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return _qwen_vl("qwen2_vl", transformers.Qwen2VLConfig, transformers.Qwen2VLProcessor, vision, {})


def _qwen2_5_vl() -> Family:
    return _qwen_vl("qwen2_5_vl", transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLProcessor, _windows(), {})


def _windows() -> dict[str, Any]:
    """A vision tower with one layer of windows of 2 x 2 merged patches, and one layer of full attention."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
    return sizes | {"window_size": 4 * PATCHES["patch_size"], "fullatt_block_indexes": [1]}


def _qwen3_vl() -> Family:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
    vision = sizes | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    rope = {"mrope_interleaved": True}
    return _qwen_vl("qwen3_vl", transformers.Qwen3VLConfig, transformers.Qwen3VLProcessor, vision, rope, head_dim=8)


def _qwen3_5() -> Family:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 64}
    rope = {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config, processor = transformers.Qwen3_5Config, transformers.Qwen3VLProcessor
    return _qwen_vl("qwen3_5", config, processor, sizes, rope, **layers, **linear)


def _internvl() -> Family:
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = _tokenizer([*names.values(), "<video>"], video_token="<video>", **names)
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.InternVLConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config=vision | {"image_size": 8, "patch_size": 2},
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    processor = without_video(transformers.InternVLProcessor)(
        image_processor=transformers.GotOcr2ImageProcessorPil(size={"height": 8, "width": 8}, max_patches=2),
        tokenizer=tokenizer,
        video_processor=video_part("InternVLVideoProcessor"),
        image_seq_length=4,
        chat_template=_template(image="<IMG_CONTEXT>\n"),
    )
    return _family("internvl", config, processor, image="<IMG_CONTEXT>")


def _llava() -> Family:
    tokenizer = _tokenizer(["<image>"])
    vision = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlavaConfig(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config=vision | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=8),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template(image="<image>\n"),
    )
    return _family("llava", config, processor, image="<image>")


def _gemma3() -> Family:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(list(names.values()), **names)
    tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])  # vLLM looks them up
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 8}
    config = transformers.Gemma3Config(
        text_config=_text(tokenizer, query_pre_attn_scalar=8, **layers),
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 8,
            "patch_size": 2,
        },
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": 8, "width": 8}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=_template(image="<start_of_image>"),
    )
    return _family("gemma3", config, processor, image="<image_soft_token>")


def _idefics(name: str, config: type, build: Callable[..., Any], images: type) -> Family:
    tiles = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    tokenizer = _tokenizer(["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *tiles])
    image = tokenizer.convert_tokens_to_ids("<image>")
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    made = config(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config=vision | {"image_size": 8, "patch_size": 2},
        image_token_id=image,
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
    )
    processor = build(
        image_processor=images(size={"longest_edge": 16}, max_image_size={"longest_edge": 8}, do_image_splitting=False),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_template(image="<image>"),
    )
    return _family(name, made, processor, image="<image>")


def _idefics3() -> Family:
    return _idefics(
        "idefics3",
        transformers.Idefics3Config,
        transformers.Idefics3Processor,
        transformers.Idefics3ImageProcessorPil,
    )


def _smolvlm() -> Family:
    def build(**parts: Any) -> Any:
        processing_smolvlm.num2words = processing_smolvlm.num2words or str  # an optional package; for texts of videos
        video = video_part("SmolVLMVideoProcessor")
        return without_video(transformers.SmolVLMProcessor)(video_processor=video, **parts)

    return _idefics("smolvlm", transformers.SmolVLMConfig, build, transformers.SmolVLMImageProcessorPil)


def _encoder(**changes: Any) -> dict[str, Any]:
    sizes = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    return sizes | {"num_mel_bins": SPECTRA["feature_size"], "max_source_positions": 50} | changes


def _qwen2_audio() -> Family:
    tokenizer = _tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    config = transformers.Qwen2AudioConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        audio_config=_encoder(),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(**SPECTRA),
        tokenizer=tokenizer,
        chat_template=_template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>\n"),
    )
    return _family("qwen2_audio", config, processor, audio="<|AUDIO|>")


def _qwen2_5_omni_thinker() -> Family:
    names = {"audio": "<|AUDIO|>", "image": "<|IMAGE|>", "video": "<|VIDEO|>"}
    ends = {"vision_bos": "<|vision_bos|>", "vision_eos": "<|vision_eos|>"}
    ends |= {"audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>"}
    tokens = {f"{kind}_token": token for kind, token in (names | ends).items()}
    tokenizer = _tokenizer(list(tokens.values()), **tokens)
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=_text(tokenizer, rope_parameters=dict(SECTIONS), tie_word_embeddings=False),
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 4} | _windows(),
        audio_config=_encoder(n_window=10, output_dim=32),
        audio_token_index=tokenizer.audio_token_id,
        image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
        audio_start_token_id=tokenizer.audio_bos_token_id,
        audio_end_token_id=tokenizer.audio_eos_token_id,
        vision_start_token_id=tokenizer.vision_bos_token_id,
        vision_end_token_id=tokenizer.vision_eos_token_id,
    )
    processor = without_video(transformers.Qwen2_5OmniProcessor)(
        image_processor=transformers.Qwen2VLImageProcessorPil(**PATCHES),
        video_processor=video_part("Qwen2VLVideoProcessor", patch_size=4, merge_size=2),
        feature_extractor=transformers.WhisperFeatureExtractor(**SPECTRA),
        tokenizer=tokenizer,
        chat_template=_template(
            image="<|vision_bos|><|IMAGE|><|vision_eos|>", audio="<|audio_bos|><|AUDIO|><|audio_eos|>"
        ),
    )
    return _family("qwen2_5_omni_thinker", config, processor, image=names["image"], audio=names["audio"])


FAMILIES: dict[str, Callable[[], Family]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "internvl": _internvl,
    "llava": _llava,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni_thinker": _qwen2_5_omni_thinker,
}
