import json
import pickle

import pytest
import torch
import transformers
from transformers import AutoProcessor

from rft.data.encode.media.without_video import load_processor, without_video
from tests.families import FAMILIES, family, picture, sound

VIDEO = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "qwen2_5_omni_thinker"]
HUB = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "merge_size": 2,
    "fps": 2.0,
}  # a part as torchvision's machine saves it

needs_no_torchvision = pytest.mark.skipif(
    transformers.utils.is_torchvision_available(), reason="tests what a machine without torchvision does"
)


def outputs(made, processor):
    media = {"images": [picture(1, 24, 16)]} if "image" in made.kinds else {"audio": [sound(1)]}
    batch = processor(text=[made.render(made.kinds[0], "hi")], return_tensors="pt", **media)
    return {key: value.tolist() for key, value in batch.items()}


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_processor_loads_back(name, tmp_path):
    made = family(name)
    made.processor.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    assert type(loaded) is type(made.processor)
    assert loaded.chat_template == made.processor.chat_template
    assert outputs(made, loaded) == outputs(made, made.processor)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_processor_has_the_name_of_its_class(name, tmp_path):
    made = family(name)
    made.processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())["processor_class"]
    assert saved == transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES.get(name, "Qwen2_5OmniProcessor")


@needs_no_torchvision
@pytest.mark.parametrize("name", VIDEO)
def test_auto_processor_fails_where_load_processor_works(name, tmp_path):
    family(name).processor.save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError, AttributeError, ImportError)):
        AutoProcessor.from_pretrained(tmp_path)
    load_processor(str(tmp_path))


@needs_no_torchvision
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_omni_thinker"])
def test_settings_of_videos_and_images_survive_a_load_and_a_save(name, tmp_path):
    made = family(name)
    made.processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    images = saved["image_processor"] | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    rewrite(tmp_path / "processor_config.json", image_processor=images, video_processor=HUB)
    loaded = load_processor(str(tmp_path))
    assert type(loaded.image_processor) is transformers.Qwen2VLImageProcessorPil
    assert loaded.image_processor.patch_size == 4
    assert loaded.video_processor.fps == 2.0
    assert outputs(made, loaded) == outputs(made, made.processor)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/processor_config.json").read_text())["video_processor"] == HUB


@needs_no_torchvision
def test_old_folder_has_its_settings_in_preprocessor_config(tmp_path):
    made = family("qwen2_vl")
    made.processor.save_pretrained(tmp_path)
    config = tmp_path / "processor_config.json"
    images = json.loads(config.read_text())["image_processor"]
    config.unlink()
    old = images | {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    loaded = load_processor(str(tmp_path))
    assert outputs(made, loaded) == outputs(made, made.processor)
    assert loaded.to_dict()["video_processor"]["video_processor_type"] == "Qwen2VLVideoProcessor"
    assert loaded.to_dict()["video_processor"]["patch_size"] == 4


@needs_no_torchvision
def test_class_of_the_configuration_is_the_last_source(tmp_path):
    made = family("qwen2_vl")
    made.processor.save_pretrained(tmp_path)
    made.config.save_pretrained(tmp_path)
    for file in ("processor_config.json", "tokenizer_config.json"):
        content = json.loads((tmp_path / file).read_text())
        content.pop("processor_class", None)
        (tmp_path / file).write_text(json.dumps(content))
    assert type(load_processor(str(tmp_path))) is type(made.processor)


@needs_no_torchvision
def test_call_with_videos_names_the_package():
    made = family("qwen2_vl")
    with pytest.raises(ValueError, match="pip install torchvision"):
        made.processor(text=["<|video_pad|>"], videos=[[picture(1), picture(2)]])


@needs_no_torchvision
@pytest.mark.parametrize("name", VIDEO)
def test_pickled_processor_is_the_same(name):
    made = family(name)
    loaded = pickle.loads(pickle.dumps(made.processor))
    assert type(loaded) is type(made.processor)
    assert outputs(made, loaded) == outputs(made, made.processor)


def test_class_without_a_video_part_stays():
    assert without_video(transformers.LlavaProcessor) is transformers.LlavaProcessor


def test_class_stays_where_torchvision_is_installed(monkeypatch):
    monkeypatch.setattr("rft.data.encode.media.without_video.is_torchvision_available", lambda: True)
    assert without_video(transformers.Qwen2VLProcessor) is transformers.Qwen2VLProcessor


@needs_no_torchvision
def test_subclass_is_made_once():
    made = without_video(transformers.Qwen2VLProcessor)
    assert made is without_video(transformers.Qwen2VLProcessor)
    assert issubclass(made, transformers.Qwen2VLProcessor) and made is not transformers.Qwen2VLProcessor


def test_folder_of_a_tokenizer_has_no_processor(tmp_path):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=family("llava").processor.tokenizer.backend_tokenizer
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no processor"):
        load_processor(str(tmp_path))


def test_empty_folder_has_no_processor(tmp_path):
    with pytest.raises(ValueError, match="cannot load a processor"):
        load_processor(str(tmp_path))


def test_code_of_the_folder_never_runs(tmp_path):
    family("llava").processor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "processor_config.json").read_text())
    del config["processor_class"]
    (tmp_path / "processor_config.json").write_text(json.dumps(config | {"auto_map": {"AutoProcessor": "own.Own"}}))
    tokens = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokens.pop("processor_class", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    (tmp_path / "own.py").write_text("raise RuntimeError('ran')")
    with pytest.raises(ValueError, match=r"trust_remote_code|has no processor"):
        load_processor(str(tmp_path))


KINDS = [(name, kind) for name in FAMILIES for kind in family(name).kinds]
UNCHECKED = [("idefics3", "image"), ("qwen2_5_omni_thinker", "audio")]  # transformers drops features that have no place


def media(kind, *seeds):
    return (
        {"images": [picture(seed) for seed in seeds]} if kind == "image" else {"audio": [sound(seed) for seed in seeds]}
    )


def batch(made, kind, seed, text="hi"):
    return made.processor(text=[made.render(kind, text)], return_tensors="pt", **media(kind, seed))


@pytest.mark.parametrize("name, kind", KINDS)
def test_model_reads_what_the_processor_writes(name, kind):
    made = family(name)
    inputs = batch(made, kind, 1)
    held = inputs["input_ids"] == made.placeholders[kind]
    assert held.sum() == (5 if kind == "audio" else 4)
    assert made.processor.tokenizer.unk_token_id not in inputs["input_ids"]
    model = made.model()
    with torch.no_grad():
        logits = model(**inputs).logits
        other = model(
            **(inputs | {key: value for key, value in batch(made, kind, 2).items() if value.is_floating_point()})
        ).logits
    assert logits.shape == (*inputs["input_ids"].shape, len(made.processor.tokenizer))
    assert logits.isfinite().all()
    first = int(held[0].nonzero()[0])
    after = int(held[0].nonzero()[-1]) + 1
    torch.testing.assert_close(logits[:, :first], other[:, :first])
    assert ((logits - other).abs().amax(-1)[:, after:] > 1e-3).all()


@pytest.mark.parametrize("name, kind", [pair for pair in KINDS if pair not in UNCHECKED])
def test_model_refuses_another_number_of_placeholders(name, kind):
    made = family(name)
    inputs = batch(made, kind, 1)
    keep = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    keep[0, (inputs["input_ids"] == made.placeholders[kind])[0].nonzero()[0]] = False
    short = {key: value[:, keep[0]] if value.shape == keep.shape else value for key, value in inputs.items()}
    with pytest.raises((ValueError, RuntimeError)), torch.no_grad():
        made.model()(**short)


@pytest.mark.parametrize("name, kind", KINDS)
def test_model_generates(name, kind):
    made = family(name)
    inputs, model = batch(made, kind, 1), made.model()
    written = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    size = inputs["input_ids"].shape[1]
    assert written.shape == (1, size + 4)
    with torch.no_grad():
        scores = model(**inputs).logits[0, -1]
    scores[made.processor.tokenizer.eos_token_id] = -torch.inf  # min_new_tokens forbids it
    assert written[0, size] == scores.argmax()
