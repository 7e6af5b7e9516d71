"""Checks that a model can be built, loaded and trained, before its weights are read. Messages name the key."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.forward.backbone import ROUTER_BALANCE
from rft.actor.forward.logits import vocabulary_size
from rft.actor.init import CONFIG_ERRORS, SCORING, knows_model, meta_model, read_config
from rft.actor.options import PATTERNS
from rft.algorithm.roles import REFERENCE, ROLES, Role
from rft.data.rows.base import StreamedRows
from rft.data.rows.lazy import Rows
from rft.errors import Check, checks, part
from rft.imports import import_part
from rft.registry import Target
from rft.setup.components import PolicyParts

TEXT = "choose a causal language model of text, such as a qwen3 or a llama"
CAUSAL = ("gpt_neox", "gpt_neox_japanese")  # their is_decoder is false and has no effect
# A part, which a run whose model has a path imports: its module and its function.
STORED = ("rft.setup.stored_weights", "check_stored")


def check_loadable(
    config: PretrainedConfig, path: str | None, head: str, key: str, reads_weights: bool, media: bool = False
) -> None:
    """Checks that a model is a causal language model, that its config can be built, and that its weights fit.

    Args:
        config: of the model.
        path: a folder or hub name; None for a new model. Only the weights of a folder are checked. Of an adapter its
            base is checked.
        head: of the actor. The weights of a classifier are checked where they are loaded.
        key: the yaml key of the actor, for messages.
        reads_weights: a folder must have weights; mode=plan needs a config alone.
        media: the run has a processor, so the model takes media.

    Raises:
        ValueError: names the key and the cure.
    """
    where = f"{key}.model_config" if path is None else f"{key}.path={path}"
    if head not in SCORING and not knows_model(config, media):
        raise ValueError(f"{where}: transformers has no causal language model of type {config.model_type}; {TEXT}")
    text = config.get_text_config()
    if "max_position_embeddings" not in {*text.to_dict(), *text.attribute_map}:
        raise ValueError(f"{where}: a {config.model_type} states no max_position_embeddings, its context; {TEXT}")
    _check_heads(config, where)
    if head in SCORING:
        _check_reader(config, head, where, media)
    model = _causal_model(config, where, media) if head not in SCORING else None
    if path is not None:
        import_part(*STORED, where)(path, model, config, head, where, reads_weights)


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
    """Checks that a model has an embedding for every token of text. It may have more, as padding.

    Tokens that the tokenizer names beside the standard ones are left out: those of google/gemma-3-1b-it are for input
    other than text, and its model lacks one of them.

    Args:
        config: of the model.
        path: of the model.
        key: its yaml key, for messages.

    Raises:
        ValueError: names the keys and the cure.
    """
    standard = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    left_out = {token for name, token in tokenizer.special_tokens_map.items() if name not in standard}
    number, token = max((number, token) for token, number in tokenizer.get_vocab().items() if token not in left_out)
    if number >= (size := config.get_text_config().vocab_size):
        raise ValueError(
            f"{key}.path={path}: the model has {size} tokens (vocab_size in config.json), but actor.tokenizer has "
            f"{token!r} with the id {number}; set actor.tokenizer to that of the model, or add rows to its embeddings "
            "with resize_token_embeddings of transformers"
        )


def _causal_model(config: PretrainedConfig, where: str, media: bool) -> PreTrainedModel:
    """The model on the meta device; raises a ValueError for one that does not compute text from left to right alone."""
    if config.to_dict().get("is_decoder") is False and config.model_type not in CAUSAL:
        raise ValueError(f"{where}: each token of a {config.model_type} reads those after it; {TEXT}")
    try:
        model = meta_model(config)
    except (*CONFIG_ERRORS, RuntimeError, ArithmeticError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{where}: transformers cannot build the model ({type(error).__name__}: {reason}); correct its config"
        ) from error
    if empty := next((name for name, tensor in model.named_parameters() if not tensor.numel()), None):
        raise ValueError(f"{where}: the weight {empty} has no element; all sizes must be at least 1")
    reads_more = model.config.get_text_config() is not model.config
    if reads_more and not media:
        raise ValueError(
            f"{where}: {type(model).__name__} reads more than text; set actor/processor=pretrained, or {TEXT}"
        )
    if media and not reads_more:
        raise ValueError(f"{where}: {type(model).__name__} reads text alone; set actor/processor=none")
    if model.base_model is model and (model.get_output_embeddings() is None or config.is_encoder_decoder):
        raise ValueError(f"{where}: {type(model).__name__} has no head that reads one sequence of states; {TEXT}")
    return model


def _check_reader(config: PretrainedConfig, head: str, where: str, media: bool) -> None:
    """Raises a ValueError if the run has a processor and the classifier reads text alone, or the other way round."""
    reads_more = config.get_text_config() is not config
    if media and not reads_more:
        raise ValueError(f"{where}: a {config.model_type} reads text alone; set actor/processor=none")
    classifiers = import_part("rft.actor.scorers", "CLASSIFIERS", where)
    if reads_more and not media and type(config) not in classifiers[head].types:
        raise ValueError(
            f"{where}: a {config.model_type} reads more than text; set actor/processor=pretrained, or {TEXT}"
        )


def _check_heads(config: PretrainedConfig, where: str) -> None:
    """Raises a ValueError if the attention heads of a model do not fit each other."""
    sizes = config.get_text_config().to_dict()
    heads, shared, size = (sizes.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads is not None and shared is not None and (heads < 1 or shared < 1 or heads % shared):
        raise ValueError(
            f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={shared}; correct one of them"
        )
    if size is not None and size % 2:
        raise ValueError(f"{where}: head_dim={size}: rotary embeddings turn pairs of numbers; choose an even one")


class RunParts(PolicyParts):
    """The rows of a run beside tokenizer and config, and the checks of its models against them; no weights are read."""

    @part
    def rows(self) -> Any:
        return self.job.train.build(key="data.train")

    @part
    def stream(self) -> StreamedRows | None:
        return self.rows.stream(sorted(self.job.needs)) if self.job.run.data.streaming else None

    @part
    def train(self) -> Rows:
        rows: Rows = self.rows.load(sorted(self.job.needs)) if self.stream is None else self.stream.preview()
        return rows

    @checks
    def _sampled(self) -> Iterator[Check]:
        if self.job.facts.sampled != "never":
            yield lambda: self.job.check_sampled(self.train, self.job.facts.scores)

    @part
    def held_out(self) -> dict[str, Rows]:
        return self.job.load_held_out()

    @part
    def canary(self) -> Rows:
        """The canary tasks; empty if there are none."""
        reward = self.job.reward
        if reward.canary.path is None or not self.job.facts.scores:
            return ()
        rows: Rows = import_part("rft.evaluation.canary", "load_tasks", "reward.canary.path")(reward)
        return rows

    @checks
    def _apart(self) -> Iterator[Check]:
        yield self.job.run.data.check_apart

    @part
    def model_config(self) -> PretrainedConfig:
        return self.read_loadable_config(self.job.actor)

    @checks
    def _models(self) -> Iterator[Check]:
        job = self.job
        yield from self.check_config()
        if ROUTER_BALANCE in job.algorithm.policy.outputs:
            check = import_part("rft.actor.forward.routers", "check_routers", f"algorithm.terms.{ROUTER_BALANCE}")
            yield lambda: check(self.model_config)
        yield from (partial(self.check_helper, role) for role in ROLES)
        yield from (partial(self.check_model_parts, model) for model in (job.actor, *job.helpers.values()))
        yield lambda: job.source.options.check_tokens(job.check_context, self.encoder)

    def read_model_config(self, model: Target) -> PretrainedConfig:
        """The config of a model, without its weights. A new model has the vocabulary size of the tokenizer."""
        options, size, media = model.options, vocabulary_size(self.tokenizer), self.job.processor is not None
        return read_config(options.path, options.model_config, size, model.key, options.trust_remote_code, media)

    def read_loadable_config(self, model: Target) -> PretrainedConfig:
        """As `read_model_config`, of a model that can be built and loaded, and that knows all tokens."""
        config, path = self.read_model_config(model), model.options.path
        head, media = model.options.head, self.job.processor is not None
        check_loadable(config, path, head, model.key, self.job.reads_weights, media)
        if path is not None:
            check_vocabulary(config, self.tokenizer, path, model.key)
        return config

    def check_helper(self, role: Role) -> None:
        """Checks the model of a role if the run loads it.

        Raises:
            ValueError: names the key and the cure.
        """
        job = self.job
        precomputed = role is REFERENCE and job.precompute  # a resumed run reads the file, and needs no model
        if role.writes(job.algorithm.reads()) and not (precomputed or job.starts_as_policy(role)):
            model = job.helpers[role.key]
            temperature = 1.0 if job.facts.sampled == "never" else job.run.rollout.temperature
            model.options.check(role.key, self.tokenizer, temperature)
            if model.factory.has_weights:
                self.read_loadable_config(model)

    def check_model_parts(self, model: Target) -> None:
        """Checks that `frozen` and `lr_factors` name parameters of the model, and that Liger knows it.

        Raises:
            ValueError: names the key and the cure.
        """
        if not model.factory.has_weights:
            return
        options, optimizers = model.options, {f"{model.key}.optimizer": model.options.optimizer}
        if model is self.job.actor and self.job.run.warmup is not None:
            optimizers["warmup.optimizer"] = self.job.run.warmup.optimizer
        factors = {key: each.lr_factors for key, each in optimizers.items() if each is not None and each.lr_factors}
        if options.frozen or factors or (options.liger and (options.path or options.model_config)):
            check_parts = import_part(PATTERNS, "check_parts", f"frozen, lr_factors or liger of {model.key}")
            check_parts(self.read_model_config(model), options, factors, model.key)
