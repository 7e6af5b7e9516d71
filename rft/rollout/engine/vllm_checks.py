"""How vLLM samples, in this process and in servers, and what it does not support."""

from typing import Any

from rft.errors import listed
from rft.remote.http_client import ServerClient
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.vllm_cpu import ENDS, PARTS

COLDEST, HOTTEST = 0.01, 2.0  # vLLM raises a lower temperature, and refuses a higher one
MOST_BIASED = 1024  # entries of a logit_bias that its workers on a GPU take (MAX_NUM_LOGIT_BIAS_TOKENS)
LOGPROBS = "processed_logprobs"  # of the distribution that is drawn from
SPECULATES = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def check_sampling(sampling: Sampling) -> None:
    """Raises a ValueError that begins with the option if vLLM lacks it, or defines it differently."""
    if sampling.temperature and not COLDEST <= sampling.temperature <= HOTTEST:
        raise ValueError(f"temperature={sampling.temperature}: vLLM samples between {COLDEST} and {HOTTEST}, or at 0")
    if sampling.first_token is not None:
        raise ValueError("first_token: vLLM draws all tokens alike; set rollout/first_token=none or rollout=hf")
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise ValueError(
            f"min_p={sampling.min_p} with top_p={sampling.top_p}: vLLM takes min-p first, which is another "
            "distribution; set one of the two, or choose rollout=hf"
        )


def sampling_params(
    sampling: Sampling, seed: int, limit: int, ends: list[int], forbidden: dict[int, float]
) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` for one sample, which is decoded only to find stop strings.

    Args:
        limit: most new tokens.
        ends: tokens that end the sample.
        forbidden: the bias of each token that is never sampled.
    """
    params = {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "stop": sampling.stop,
        "stop_token_ids": ends,
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(sampling.stop),
    }
    return params | ({"logit_bias": forbidden} if forbidden else {})


def check_speculation(engine_args: dict[str, Any]) -> None:
    """Raises a ValueError that names rollout.engine_args.<key> if it turns on speculative decoding."""
    if asked := [name for name in SPECULATES if engine_args.get(name) is not None]:
        raise ValueError(
            f"rollout.engine_args.{asked[0]}: where vLLM speculates, log-probabilities are not those of what it draws; "
            "take it out"
        )


def check_samples(client: ServerClient, config: Any) -> None:
    """Checks that a server samples as the run trains.

    Args:
        config: of vLLM, as the server reports it.

    Raises:
        BadResponse: it reports other log-probabilities, or dies of long prompts, see `whole_prompts`.
    """
    mode = config["model_config"]["logprobs_mode"]
    if mode != LOGPROBS:
        raise client.bad_response(f"start it with --logprobs-mode {LOGPROBS}, not {mode}")
    if config["speculative_config"] is not None:
        raise client.bad_response("with speculative decoding it reports other log-probabilities: start it without")
    if config["device_config"]["device"] == "cpu" and config["scheduler_config"][PARTS]:
        raise client.bad_response(f"{ENDS}: start it with --no-enable-chunked-prefill")


def unloaded(names: list[str]) -> str:
    """What is wrong where vLLM's model has parameters that the policy did not send."""
    return (
        f"vLLM's model has weights that the policy's does not send, and would sample with others: {listed(names)}. "
        "The two build different models of this config: choose rollout=hf, or another version of vLLM"
    )


def check_loaded(client: ServerClient, workers: list[list[str] | None]) -> None:
    """Raises `BadResponse` where a worker of a server has parameters that got no weights; None: it does not tell."""
    for missing in workers:
        if missing:
            raise client.bad_response(unloaded(missing))
