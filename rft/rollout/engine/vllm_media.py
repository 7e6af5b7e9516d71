"""Prompts with media for vLLM, whose own processor expands them."""

from typing import Any

from rft.batch.encoded import MediaFacts, as_encoded
from rft.remote.http_client import ServerClient


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
        raise ValueError(f"rollout.engine: {_one_way(model_config.architecture)}")


def check_server(client: ServerClient, config: Any, attending: list[list[str] | None]) -> None:
    """Checks that a server computes prompts with media as the trainer does.

    Args:
        config: of vLLM, as the server reports it.
        attending: of each worker, the architecture of its model if the tokens of a medium attend to all of it.

    Raises:
        BadResponse: it does not.
    """
    normalizes = config["model_config"]["multimodal_config"]["mm_device_do_normalize"]
    if normalizes and config["load_config"]["load_format"] == "dummy":
        raise client.bad_response("dummy weights change how it scales media: add --no-mm-device-do-normalize")
    if any(attending) and config["device_config"]["device"] == "cpu":
        [[architecture], *_] = filter(None, attending)
        raise client.bad_response(_one_way(architecture))


def _one_way(architecture: str) -> str:
    return (
        f"in {architecture} each token of a medium attends to all of it, but on a CPU vLLM lets it attend to earlier "
        "ones alone, and would sample from another distribution than that which is trained; set rollout=hf"
    )
