"""Checks of the options of models whose weights are in this process. Messages name the yaml key and the cure."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from rft.actor.forward.liger import check_package
from rft.algorithm.roles import POLICY, ROLES
from rft.errors import did_you_mean


def check_options(options: Mapping[str, Any], key: str) -> Iterator[str]:
    """Checks the options of one model.

    Args:
        options: of the model with this key.

    Yields:
        A message for every mistake.
    """
    yield from check_architecture(options["model_config"], f"{key}.model_config")
    yield from check_training(options, key)
    if options["share_prefix"] and not options["packing"]:
        yield f"{key}.share_prefix=true: padded rows cannot share tokens; set its packing=true as well"
    if options["liger"] and key == POLICY:  # other models have its value, unless it is typed
        check_package(key)


def check_architecture(model_config: Mapping[str, Any] | None, key: str) -> Iterator[str]:
    """Checks that transformers knows every option of a new model: it ignores those that it does not know."""
    if model_config is None:
        return
    if "model_type" not in model_config:
        yield f"{key}: expected a transformers config as {{model_type: ..., options}}, got {model_config!r}"
        return
    kind = model_config["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        yield f"{key}.model_type={kind}: transformers has no such type{did_you_mean(str(kind), CONFIG_MAPPING)}"
        return
    architecture = CONFIG_MAPPING[kind]
    known = {*architecture().to_dict(), *architecture.attribute_map, "attn_implementation"}
    for name in model_config:
        if name not in known:
            yield f"{key}.{name}: a {kind} has no such option{did_you_mean(name, known)}"


def check_training(options: Mapping[str, Any], key: str) -> Iterator[str]:
    """Checks that weights are frozen only in a model that trains, and averaged only in the policy."""
    frozen, ema = options["frozen"], options["ema"]
    if frozen and options["optimizer"] is None:
        yield f"{key}.frozen={frozen}: the {key} never trains; set {key}.frozen=[]"
    if frozen and options["lora"] is not None:
        yield (
            f"{key}.frozen={frozen}: with {key}.lora no weight of the model itself trains; choose the layers by "
            f"{key}.lora.targets and set {key}.frozen=[]"
        )
    if ema is not None and key != POLICY:
        yield f"{key}.ema={ema}: checkpoints hold the average of the actor alone; set {key}.ema=null"


def check_adapters(models: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Checks that adapters can train and be saved, and that a model computed by the adapted policy shares its options.

    Args:
        models: the options of every model, by its key.
    """
    for key, options in models.items():
        if options["lora"] is not None:
            options["lora"].check(key, options["path"], options["optimizer"] is not None)
    policy = models[POLICY]
    frozen = [role.key for role in ROLES if role.loss is None and role.follows and role.key in models]
    for key in frozen if policy["lora"] is not None else ():
        shared = models[key].keys() - {"lora", "optimizer", "frozen", "ema"}
        own = [name for name in models[key] if name in shared and models[key][name] != policy[name]]
        if own and not {"path", "model_config"} & set(own):
            yield (
                f"{key}.{own[0]}={models[key][own[0]]}: with actor.lora the {key} is computed by the actor, with its "
                f"{own[0]}={policy[own[0]]}; leave it at ${{actor.{own[0]}}}, or set {key}.path to another model"
            )
