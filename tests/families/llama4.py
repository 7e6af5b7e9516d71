"""Llama 4, whose processor of images needs torchvision: it must be installed."""

import transformers

from tests.families import Family, _family, _template, _text, _tokenizer

NAMES = {
    "image_token": "<|image|>",
    "start_of_image_token": "<|image_start|>",
    "end_of_image_token": "<|image_end|>",
    "patch_token": "<|patch|>",
    "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
}


def llama4() -> Family:
    """A family of images, which are cut into tiles of 16 x 16 pixels and stand for 4 tokens a tile."""
    tokenizer = _tokenizer(list(NAMES.values()))
    layers = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 24, "moe_layers": [1]}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    config = transformers.Llama4Config(
        text_config=_text(tokenizer, **layers, **experts),
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "pixel_shuffle_ratio": 0.5,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<|image_end|>"),
    )
    processor = transformers.Llama4Processor(
        image_processor=transformers.Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=4),
        tokenizer=tokenizer,
        patch_size=4,
        pixel_shuffle_ratio=0.5,
        chat_template=_template(image="<|image|>"),
    )
    return _family("llama4", config, processor, image="<|image|>")
