"""Prompts with media for vLLM, whose own processor expands them."""

from typing import Any

from rft.batch.encoded import MediaFacts, as_encoded


def vllm_prompt(prompt: list[int]) -> dict[str, Any]:
    """A prompt as a `TokensPrompt`: with media it has the tokens before their expansion, and the media."""
    raw = as_encoded(prompt).raw
    if raw is None:
        return {"prompt_token_ids": prompt}
    return {"prompt_token_ids": raw.ids, "multi_modal_data": dict(raw.media)}


def media_arguments(media: MediaFacts | None) -> dict[str, Any]:
    """The arguments of vLLM for a model with a processor."""
    if media is None:
        return {}
    return {
        "limit_mm_per_prompt": dict.fromkeys(media.refused, 0),  # it prepares for no other media
        # Otherwise mean and deviation of its inputs are buffers of its model, which its dummy weights overwrite.
        "mm_device_do_normalize": False,
    }


def check_attention(model_config: Any) -> None:
    """Checks on a CPU that vLLM computes the attention of the model where a prompt has media.

    Args:
        model_config: of the engine.

    Raises:
        ValueError: the tokens of a medium attend to all of it, which vLLM does not compute on a CPU.
    """
    if model_config.is_mm_prefix_lm:
        raise ValueError(
            f"rollout.engine: in {model_config.architecture} each token of a medium attends to all of it, but on a CPU "
            "vLLM lets it attend to earlier ones alone, and would sample from another distribution than that which is "
            "trained; set rollout=hf"
        )
