"""Loads the transformers model of an actor from a path or hub name, or creates one from a config in memory."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.profiler import record_function
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from rft.actor.loading.deferred_init import Drawing, NotRecordedError
from rft.actor.loading.families import language_config, text_config
from rft.actor.loading.stored import (
    StoredWeights,
    check_stored,
    fill,
    find_files,
    initialize,
    needed_names,
    needs_transformers,
    open_tensors,
    unread,
)
from rft.actor.loading.tensor_names import name_backbone, outer_prefix
from rft.actor.lora.base import find_adapter, model_path
from rft.errors import listed, without_code
from rft.imports import import_part

CONFIG_ERRORS = (StrictDataclassError, OSError, ValueError, TypeError, LookupError, AttributeError)  # of wrong values
SCORING = ("score", "step")  # heads of `rft.actor.scorers`
LOAD_WEIGHTS = ContextVar("LOAD_WEIGHTS", default=True)


@contextmanager
def init_without_loading() -> Iterator[None]:
    """In the block `load_model` reads no weights: it draws them from the seed."""
    token = LOAD_WEIGHTS.set(False)
    try:
        yield
    finally:
        LOAD_WEIGHTS.reset(token)


def read_config(
    path: str | None,
    model_config: Mapping[str, Any] | None,
    vocab_size: int,
    key: str,
    trusted: bool = False,
    media: bool = True,
) -> PretrainedConfig:
    """The transformers config of a model, without weights.

    Args:
        path: a folder or hub name, of a model or of an adapter.
        model_config: a transformers config as a mapping with `model_type`, without the vocabulary size.
        vocab_size: number of tokens of the tokenizer, the vocabulary size of a new model.
        key: the yaml key of the actor, for messages.
        trusted: code in the folder of the model may run. A config without `auto_map` names no such code: without trust,
            the `auto_map` of a model that transformers knows itself is taken out.
        media: the model reads media. Else the config is that of its text part, where transformers has a class for it.

    Raises:
        ValueError: the path cannot be read, transformers refuses a value, or neither or both are given; names the key.
    """
    if (path is None) == (model_config is None):
        raise ValueError(f"{key}: set one of {key}.path (a folder or hub name) and {key}.model_config (a new model)")
    if path is not None:
        where = repr(path)
        try:
            base = model_path(path)
            where = where if base == path else f"{base!r}, the base of the adapter {path}"
            config = AutoConfig.from_pretrained(base, trust_remote_code=trusted)
        except (*CONFIG_ERRORS, ImportError) as error:
            reason = without_code(error, key, _reason(error))
            raise ValueError(f"{key}.path: no model can be read from {where} ({reason})") from error
        if not trusted:
            vars(config).pop("auto_map", None)
        config = language_config(config)
        return config if media else text_config(config)
    assert model_config is not None
    options = dict(model_config)
    kind = options.pop("model_type", None)
    vocabulary = {"vocab_size": vocab_size}
    if isinstance(part := options.get("text_config"), Mapping):  # of a model that takes media, too
        options["text_config"], vocabulary = {**part, **vocabulary}, {}
    try:
        config = AutoConfig.for_model(kind, **vocabulary, **options)
        return config if media else text_config(config)
    except CONFIG_ERRORS as error:
        field = re.search(r"for field '(\w+)'", str(error))
        where = f"{key}.model_config.{field[1]}={options.get(field[1])}" if field else f"{key}.model_config"
        raise ValueError(f"{where}: transformers cannot use it ({_reason(error)})") from error


def load_with_head(
    path: str | None,
    config: PretrainedConfig,
    seed: int,
    pad: int,
    head: str,
    key: str,
    drawing: Drawing | None = None,
) -> PreTrainedModel:
    """The model with the head of an actor, loaded as in `load_model`.

    Args:
        path, config, seed, drawing: see `load_model`.
        pad: id of the padding token; a sequence classifier finds the end of a row by it.
        head: `lm`, `value` or one of `SCORING`. The path must have the weights of `lm`; those of another head are
            drawn from the seed if it lacks them.
        key: the yaml key of the actor, for messages.

    Raises:
        ValueError: transformers has no such classifier for this model type; names the key.
    """
    if head not in SCORING:
        return load_model(path, config, seed, headed=head == "lm", drawing=drawing)
    classifier = import_part("rft.actor.scorers", "classifier", f"{key}.head={head}")
    config, kind = classifier(config, pad, head, key)
    return load_model(path, config, seed, kind, headed=False, drawing=drawing)


def load_model(
    path: str | None,
    config: PretrainedConfig,
    seed: int,
    kind: Any = None,
    headed: bool = True,
    drawing: Drawing | None = None,
) -> PreTrainedModel:
    """The causal language model in float32: weights from the path, or drawn from the seed.

    Args:
        path: a folder or hub name. An adapter is merged into its base.
        kind: the auto class; None: that of a language model.
        headed: the path must have the weights of the head. Without them they are drawn from the seed.
        drawing: if given, weights stay on the meta device that `read_weights` can read or draw later. The numbers of a
            model without a path depend on the seed alone.

    Raises:
        ValueError: the path lacks weights, or has some of another shape; or an adapter belongs to another model.
    """
    kind = language_model_class(config) if kind is None else kind
    adapter = None if path is None else find_adapter(path)
    base = path if adapter is None else adapter.base
    with torch.random.fork_rng(), record_function("loading"):  # mode=plan counts what is allocated under this label
        torch.manual_seed(seed)  # also for a path, whose model may lack a head
        if drawing is not None and (model := _model_to_fill(base, config, kind, headed, drawing)) is not None:
            if adapter is not None:
                adapter.check(model)
            return model
        if base is None or not LOAD_WEIGHTS.get():
            return _from_config(kind, config)
        model, report = kind.from_pretrained(
            base, config=config, dtype=torch.float32, output_loading_info=True, **load_options(config)
        )
        name_backbone(model)
    _check_lacking(needed_names(model, report["missing_keys"], headed), base)
    if adapter is not None:
        adapter.check(model)
        fill(model, adapter.merged(model, model.state_dict().items()))
    return model


def _model_to_fill(
    path: str | None, config: PretrainedConfig, kind: Any, headed: bool, drawing: Drawing
) -> PreTrainedModel | None:
    """The model on the meta device but for what no file holds; None if it has to be read or drawn whole."""
    config, read = copy.deepcopy(config), LOAD_WEIGHTS.get()
    if path is None and read:
        return _model_to_draw(kind, config, drawing)
    files: list[str] = []
    if path is not None:
        config.name_or_path = path
        files = find_files(path, config) if read else []
        if not files and (read or needs_transformers(config)):
            return None
    with torch.device("meta"):
        model = _from_config(kind, config)
    if path is None or not read:
        initialize(model, set())
        return model
    with open_tensors(files) as tensors:
        weights = StoredWeights(model, tensors)
        check_stored(model, weights, path)
        if weights.ties_differ():
            return None
    missing = weights.missing()
    _check_lacking(needed_names(model, missing, headed), path)
    initialize(model, missing)
    if model.can_generate():
        download = dict.fromkeys(("cache_dir", "proxies", "token", "revision")) | {"subfolder": ""}
        no = dict.fromkeys(("force_download", "local_files_only", "trust_remote_code"), False)
        model.adjust_generation_fn(None, True, None, path, **download, **no)
    return model.eval()


def _model_to_draw(kind: Any, config: PretrainedConfig, drawing: Drawing) -> PreTrainedModel | None:
    """The model on the meta device, or None if it has to be drawn whole."""
    state = torch.get_rng_state()
    try:
        with drawing:
            model = _from_config(kind, config)
    except NotRecordedError:
        torch.set_rng_state(state)
        return None
    drawing.keep(model)
    return model


def _from_config(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, **load_options(config))
    name_backbone(model)
    return model


def read_weights(model: torch.nn.Module, plain: PreTrainedModel, path: str | None, drawing: Drawing) -> None:
    """Reads or draws the weights that `load_model` has left on the meta device; by now they have memory.

    Args:
        model: may be sharded and have adapters.
        plain: the same model as it was before, for its names and shapes.
        path, drawing: that were given to `load_model`.
    """
    with record_function("reading"):
        adapter = None if path is None else find_adapter(path)
        if not LOAD_WEIGHTS.get():
            held = None if adapter is None else adapter.layers  # in memory while the weights are read
            fill(model, ((name, unread(tensor.shape)) for name, tensor in plain.state_dict().items()))
            del held
            return
        if path is None:
            inside = outer_prefix(plain)
            fill(model, ((name.removeprefix(inside), tensor) for name, tensor in drawing.items()))
            return
        with open_tensors(find_files(model_path(path), plain.config)) as tensors:
            stored = StoredWeights(plain, tensors).items()
            fill(model, stored if adapter is None else adapter.merged(plain, stored))


def _check_lacking(names: list[str], path: str) -> None:
    if names:
        raise ValueError(f"{path}: the weights lack {listed(names)}; copy the whole model there")


def attention(config: PretrainedConfig) -> dict[str, str]:
    """The attention implementation: `eager` for models with soft-capped attention logits, which the others ignore."""
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    return {"attn_implementation": "eager"} if capped else {}


def load_options(config: PretrainedConfig) -> dict[str, Any]:
    """The arguments of an auto class for a config of `read_config`: its attention, and whether its code may run."""
    return {**attention(config), "trust_remote_code": "auto_map" in vars(config)}


def knows_model(config: PretrainedConfig, media: bool) -> bool:
    """Whether transformers, or the code of a trusted folder, has a language model for a config.

    Args:
        media: also one that reads more than text.
    """
    kinds = [(AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)]
    kinds += [(AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING)] if media else []
    return any(type(config) in types or own_class(config, kind) for kind, types in kinds)


def own_class(config: PretrainedConfig, kind: Any) -> bool:
    """Whether the code of a trusted folder has the class that an auto class loads."""
    return kind.__name__ in (vars(config).get("auto_map") or {})


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model on the meta device: names and shapes of its weights, without memory for them."""
    with torch.device("meta"):
        model: PreTrainedModel = language_model_class(config).from_config(config, **load_options(config))
    name_backbone(model)
    return model


def language_model_class(config: PretrainedConfig) -> Any:
    """The auto class of a language model: with media, where the config of `read_config` has more than a text part."""
    whole = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and not own_class(config, AutoModelForCausalLM)
    return AutoModelForMultimodalLM if whole or not knows_model(config, media=False) else AutoModelForCausalLM


def blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that are sharded one by one: the outermost of the classes in `_no_split_modules` of transformers."""
    names = set(model._no_split_modules or ())
    candidates = [module for module in model.modules() if type(module).__name__ in names]
    inside = {id(part) for block in candidates for part in block.modules() if part is not block}
    return [block for block in candidates if id(block) not in inside]


def _reason(error: Exception) -> str:
    """The line of an error that says what is wrong: that below the headline of a validation, or else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[1].strip() if lines[0].startswith(("Validation error", "Class validation error")) else lines[0]
