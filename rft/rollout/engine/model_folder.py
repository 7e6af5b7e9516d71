"""The folder that an engine with its own model code starts from: a checkpoint without weights."""

import copy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rft.batch.encoded import MediaFacts


def write_model_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, media: MediaFacts | None = None
) -> None:
    """Writes config, generation config, tokenizer and processor. The engine starts from them with dummy weights.

    Args:
        model: may be without weights.
        folder: created if it is missing.
        media: of the processor; None for a model of text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    assert model.generation_config is not None, "a model that generates has a generation config"
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if media is not None:
        media.save(folder)
