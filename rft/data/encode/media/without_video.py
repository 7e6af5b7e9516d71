"""Loads processors of images and audio on machines without torchvision, which only their video part needs."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.utils import cached_file, is_torchvision_available

from rft.errors import without_code

VIDEO = "video_processor"  # the name of the part in transformers
CONFIGS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


class VideoSettings(SimpleNamespace):
    """Stands for a video processor: holds the settings of its file, so that a saved processor keeps them.

    Processors read settings such as `merge_size` for images too. A setting that the file leaves out is None.
    """

    model_input_names: tuple[str, ...] = ()

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise ValueError("videos need torchvision, and this machine has none; run `pip install torchvision`")

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _WithoutVideo(ProcessorMixin):
    """Stands between a processor class and `ProcessorMixin`: takes settings in place of the video processor."""

    def __init__(self, *args: Any, **parts: Any):
        named = dict(zip(super().get_attributes(), args, strict=False)) | parts
        self.video_processor = VideoSettings(**named.pop(VIDEO, None) or {})
        super().__init__(**named)

    @classmethod
    def get_attributes(cls) -> list[str]:
        return [name for name in super().get_attributes() if name != VIDEO]

    @classmethod
    def _get_arguments_from_pretrained(cls, path: Any, *args: Any, **options: Any) -> list[Any]:
        parts: list[Any] = super()._get_arguments_from_pretrained(path, *args, **options)
        parts.insert(super().get_attributes().index(VIDEO), _video_settings(path))
        return parts

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        settings = vars(output.pop(VIDEO))
        return output | ({VIDEO: settings} if settings else {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (type(self).__mro__[1],), vars(self)


def without_video(cls: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The processor class for this machine: `cls`, or without torchvision a subclass that needs no video processor.

    The subclass has the name of `cls`, and `save_pretrained` writes that name. Its `video_processor` may be None or a
    dict of settings. Call it for images and audio; a call with videos raises a ValueError.
    """
    if is_torchvision_available() or VIDEO not in cls.get_attributes():
        return cls
    key: Any = cls  # mypy takes no class for hashable
    return _subclass(key)


def video_part(name: str, **settings: Any) -> Any:
    """The video processor of this class of transformers; without torchvision its settings, for `without_video`."""
    if is_torchvision_available():
        return getattr(transformers, name)(**settings)
    return {"video_processor_type": name, **settings}


def load_processor(path: str, trusted: bool = False) -> ProcessorMixin:
    """Loads a processor as `AutoProcessor.from_pretrained` does. Without torchvision it leaves out the video part.

    Args:
        path: folder, or name on the hub.
        trusted: python files of the path may run, where the processor needs them.

    Raises:
        ValueError: `path` has no processor, or one that cannot be loaded.
    """
    try:
        cls = None if is_torchvision_available() else _class_of(path, trusted)
        loader = AutoProcessor if cls is None else without_video(cls)
        processor = loader.from_pretrained(path, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError) as error:
        reason = without_code(error, "actor", str(error))
        raise ValueError(f"{path}: cannot load a processor ({reason})") from error
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(
            f"{path} has no processor, only a {type(processor).__name__}: name the folder of a model of images or "
            "audio, with its processor_config.json or preprocessor_config.json"
        )
    return processor


@cache
def _subclass(cls: type[ProcessorMixin]) -> type[ProcessorMixin]:
    return type(cls.__name__, (cls, _WithoutVideo), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _empty(cls: type[ProcessorMixin]) -> ProcessorMixin:
    """A processor without parts: what unpickling fills."""
    made: Any = without_video(cls)
    return made.__new__(made)


def _class_of(path: str, trusted: bool) -> type[ProcessorMixin] | None:
    """The processor class that the files of `path` name; None if they name none."""
    for file in (*CONFIGS, "tokenizer_config.json"):
        name = _json(path, file).get("processor_class")
        if name is not None:
            return processor_class_from_name(name)
    if not _json(path, "config.json"):
        return None
    return PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(path, trust_remote_code=trusted)), None)


def _video_settings(path: str) -> dict[str, Any]:
    """The settings of the video part, from the files in the order of `AutoVideoProcessor`."""
    nested, images, videos = (_json(path, file) for file in CONFIGS)
    settings = dict(nested.get(VIDEO) or videos or images)
    kind = settings.pop("image_processor_type", None)
    if kind is not None and "video_processor_type" not in settings:
        settings["video_processor_type"] = kind.removesuffix("Fast").replace("ImageProcessor", "VideoProcessor")
    return settings


def _json(path: str, file: str) -> dict[str, Any]:
    path_of_file = cached_file(path, file, _raise_exceptions_for_missing_entries=False)
    if path_of_file is None:
        return {}
    with open(path_of_file, encoding="utf-8") as reader:
        return json.load(reader)
