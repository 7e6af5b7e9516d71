"""The folder from which an engine that brings its own model starts: all of a checkpoint but its weights."""

import copy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_model_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes config, generation config and tokenizer. The engine starts with dummy weights until the run's come.

    Args:
        model: may be without weights.
        folder: made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    assert model.generation_config is not None, "a model that generates has a generation config"
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
