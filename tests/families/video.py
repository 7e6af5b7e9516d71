"""The families whose processors read video, with that part: torchvision must be installed."""

from dataclasses import replace

import transformers

from tests.families import PATCHES, Family, _template, family
from tests.families.rows import OMNI

QWEN = "<|vision_start|><|{}_pad|><|vision_end|>"
SLOTS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), (QWEN.format("image"), QWEN.format("video"))),
    "internvl": ("<IMG_CONTEXT>\n", "<video>\n"),
    OMNI: ("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_bos|><|VIDEO|><|vision_eos|>"),
}
READ = tuple(SLOTS)


def family_with_video(name: str) -> Family:
    """A family of `tests.families` that reads images and video, of which it samples two frames a second."""
    one, (image, video) = family(name), SLOTS[name]
    processor = one.processor
    if name == "internvl":
        part = transformers.InternVLVideoProcessor(size={"height": 8, "width": 8}, fps=2)
    elif name == "qwen3_vl":
        part = transformers.Qwen3VLVideoProcessor(**PATCHES, min_frames=2)
    else:
        part = transformers.Qwen2VLVideoProcessor(**PATCHES, fps=2, min_frames=2, cap_pixels_per_frame=False)
    processor.video_processor = part
    processor.chat_template = processor.tokenizer.chat_template = _template(image=image, video=video)
    token = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
    return replace(one, kinds=("image", "video"), placeholders={**one.placeholders, "video": token})
