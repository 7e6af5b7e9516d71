"""The processors that `actor.processor` names: those of a folder, and small ones of the built-in tasks."""

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from rft.data.encode.media.processor import ModelProcessor, placeholder_tokens, slots_of_template
from rft.data.encode.media.without_video import VIDEO, load_processor, video_part, without_video
from rft.ranges import PositiveFloat, PositiveInt


def pretrained(
    *,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    trust_remote_code: bool = False,
    video_fps: PositiveFloat | None = None,
) -> ModelProcessor:
    """The processor of a model on disk or on the hub, with the tokenizer of the run.

    Args:
        path: folder, or name on the hub.
        trust_remote_code: python files of the path may run, where the processor needs them.
        video_fps: frames of a second of video that the model reads; None for what the settings of the processor state.

    Raises:
        ValueError: no processor can be loaded from `path`, or `video_fps` is set and it takes no video.
    """
    processor = media_processor(path, tokenizer, trust_remote_code)
    if processor is None:
        raise ValueError(f"actor.processor.path={path}: its processor takes no media; set actor/processor=none")
    if video_fps is not None:
        processor.sample_video(video_fps)
    return processor


def media_processor(
    path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> ModelProcessor | None:
    """The processor of a model on disk or on the hub; None if it takes no media.

    Args:
        path: folder, or name on the hub.
        tokenizer: of the model; it gets the chat template of the processor.
        trust_remote_code: python files of the folder may run.

    Raises:
        ValueError: no processor can be loaded; begins with the path.
    """
    processor = load_processor(path, trust_remote_code)
    kinds = list(placeholder_tokens(processor))
    if "video" in kinds and not _takes_video(processor):
        kinds.remove("video")
    if not kinds:
        return None
    if processor.chat_template is not None:
        tokenizer.chat_template = processor.chat_template
    slots = slots_of_template(processor, kinds)
    processor.tokenizer = tokenizer
    return ModelProcessor(processor, slots)


def _takes_video(processor: ProcessorMixin) -> bool:
    """Whether a processor has a part for video, which needs torchvision, and its tensors have names of their own: else
    those of images in the same text are lost, as with SmolVLM."""
    if VIDEO not in processor.get_attributes():
        return False
    names = {part: {*vars(processor)[part].model_input_names} for part in processor.get_attributes()}
    videos = names.pop(VIDEO)
    return not any(videos & other for other in names.values())


def patches(
    *,
    tokenizer: PreTrainedTokenizerBase,
    patch_size: PositiveInt,
    merge_size: PositiveInt,
    min_pixels: PositiveInt,
    max_pixels: PositiveInt,
) -> ModelProcessor:
    """The processor of a Qwen2.5-VL, which cuts an image into patches at its own resolution.

    Args:
        patch_size: pixels of a side of a patch.
        merge_size: a token stands for `merge_size` x `merge_size` patches.
        min_pixels, max_pixels: smaller and larger images are scaled.
    """
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"patch_size": patch_size, "merge_size": merge_size}
    processor = without_video(Qwen2_5_VLProcessor)(
        image_processor=Qwen2VLImageProcessorPil(**sizes, min_pixels=min_pixels, max_pixels=max_pixels),
        tokenizer=tokenizer,
        video_processor=video_part("Qwen2VLVideoProcessor", **sizes),  # engines with torchvision read it from the files
    )
    return ModelProcessor(processor, {"image": f"<|vision_start|>{processor.image_token}<|vision_end|>"})


def mel_frames(
    *, tokenizer: PreTrainedTokenizerBase, mel_bins: PositiveInt, seconds: PositiveInt, sampling_rate: PositiveInt
) -> ModelProcessor:
    """The processor of a Qwen2-Audio, which makes frames of a mel spectrogram.

    Args:
        mel_bins: numbers of a frame.
        seconds: length to which sounds are padded or cut.
        sampling_rate: samples per second of the sounds.
    """
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=seconds, sampling_rate=sampling_rate)
    processor = Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=tokenizer)
    return ModelProcessor(processor, {"audio": f"<|audio_bos|>{processor.audio_token}<|audio_eos|>"})
