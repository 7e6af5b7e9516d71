"""The folder that an engine with its own model code starts from: a checkpoint without weights."""

import copy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_model_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes config, generation config and tokenizer. The engine starts from them with dummy weights.

    Args:
        model: may be without weights.
        folder: created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    assert model.generation_config is not None, "a model that generates has a generation config"
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
