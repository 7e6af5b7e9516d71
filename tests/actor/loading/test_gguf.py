"""A GGUF file is converted once, into a folder with its weights, its tokenizer and its chat template."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft.actor.loading import gguf
from rft.actor.loading.gguf import folder_of
from rft.actor.loading.paths import with_folders
from rft.logger.redact import public_config
from tests.actor.loading.gguf_file import new_model, write_gguf
from tests.conftest import SOON_S


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder that already has the conversion to float32."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(file, cache):
    return folder_of(str(file), "float32", str(cache), "actor.path", lambda line: None)


def test_the_weights_are_those_of_the_file_to_the_bit(model, folder):
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == torch.float32 and not hasattr(loaded.config, "quantization_config")
    own = model.state_dict()
    assert own.keys() == loaded.state_dict().keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_tokenizer_and_its_template(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("he 1<|im_end|>") == [256, 32, 49, 259]
    assert tokenizer.decode(tokenizer.encode("né 🙂\n")) == "né 🙂\n"
    assert tokenizer.eos_token == "<|im_end|>"
    turn = [{"role": "user", "content": "he"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"


def test_another_dtype_is_another_folder(model, file, folder, cache):
    other = folder_of(str(file), "bfloat16", str(cache), "actor.path", lambda line: None)
    assert other != folder
    loaded = AutoModelForCausalLM.from_pretrained(other, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name].bfloat16()) for name, tensor in loaded.state_dict().items())


def test_a_file_is_converted_again_if_it_has_changed(file, folder, cache):
    lines = []
    assert folder_of(str(file), "float32", str(cache), "actor.path", lines.append) == folder and not lines
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    try:
        assert folder_of(str(file), "float32", str(cache), "actor.path", lines.append) != folder
    finally:
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert [line.split(":")[0] for line in lines] == [f"actor.path={file}"] * 2


@pytest.mark.parametrize("name", ["gguf.py", "gguf_facts.py"])
def test_a_file_is_converted_again_by_other_code(name, file, folder, cache, tmp_path, monkeypatch):
    for source in ("gguf.py", "gguf_facts.py"):
        shutil.copy(Path(gguf.__file__).with_name(source), tmp_path)
    monkeypatch.setattr(gguf, "__file__", str(tmp_path / "gguf.py"))
    assert folder_of(str(file), "float32", str(cache), "actor.path", lambda line: None) == folder
    with (tmp_path / name).open("a") as code:
        code.write("# another line")
    assert folder_of(str(file), "float32", str(cache), "actor.path", lambda line: None) != folder


def test_one_process_converts_for_all(file, tmp_path):
    lines = []
    with ThreadPoolExecutor(3) as threads:
        found = list(
            threads.map(lambda _: folder_of(str(file), "float32", str(tmp_path), "actor.path", lines.append), range(3))
        )
    assert len(set(found)) == 1 and len(lines) == 2
    assert [path.name for path in found[0].parent.iterdir() if path.is_dir()] == [found[0].name]


def test_without_locks_the_folder_of_the_first_process_counts(file, tmp_path, monkeypatch):
    """Another process has converted the file while this one did."""
    real = gguf.rename

    def rename(partial, folder):
        shutil.copytree(partial, folder)
        (folder / "first").touch()
        real(partial, folder)

    monkeypatch.setattr(gguf, "rename", rename)
    found = folder_of(str(file), "float32", str(tmp_path), "actor.path", lambda line: None)
    assert (found / "first").is_file()
    assert [path for path in found.parent.iterdir() if path.is_dir()] == [found]


def test_the_config_of_a_run(file, folder, cache):
    config = {
        "actor": {"tokenizer": {"path": str(file)}, "path": str(file)},
        "reward": {"terms": [{"path": "model", "prompt": "x.gguf"}]},
        "strategy": {"dtype": "float32"},
        "cache": str(cache),
    }
    found = with_folders(config, pytest.fail)
    assert found["actor"] == {"tokenizer": {"path": str(folder)}, "path": str(folder)}
    assert {**found, "actor": config["actor"]} == config
    assert public_config(found) == config


def broken(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"PK\x03\x04", "it begins with other bytes"),
        ("model.gguf", b"GGUF" + bytes(40), "transformers cannot read this GGUF file"),
        ("model-00001-of-00002.gguf", b"GGUF", "llama-gguf-split --merge"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    path = broken(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as raised:
        folder_of(path, "float32", str(tmp_path / "cache"), "actor.path", lambda line: None)
    assert str(raised.value).startswith(f"actor.path={path}: ")
    assert not any(path.is_dir() for path in (tmp_path / "cache").glob("gguf/*"))


def test_an_architecture_that_transformers_does_not_read(model, tmp_path):
    path = tmp_path / "other.gguf"
    write_gguf(path, model, "rwkv6")
    with pytest.raises(ValueError, match=r"rwkv6.*name the folder of the original model"):
        folder_of(str(path), "float32", str(tmp_path), "actor.path", lambda line: None)


def test_a_model_of_other_shapes_than_transformers_reads(tmp_path):
    path = tmp_path / "other.gguf"
    write_gguf(path, new_model(head_dim=16))
    with pytest.raises(ValueError, match=r"another model.*model.layers.0.self_attn"):
        folder_of(str(path), "float32", str(tmp_path), "actor.path", lambda line: None)
    assert not [path for path in (tmp_path / "gguf").iterdir() if path.is_dir()]


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in (str(tmp_path / "none.gguf"), "none.gguf", "user/repository/none.gguf"):
        with pytest.raises(ValueError, match=f"reference.path={path}: no such file"):
            folder_of(path, "float32", str(tmp_path), "reference.path", lambda line: None)


def test_a_file_in_the_cache_of_the_hub(file, tmp_path, monkeypatch):
    stored = tmp_path / "models--user--repository"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("0" * 40)
    snapshot = stored / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.gguf").symlink_to(file)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = folder_of("user/repository/tiny.gguf", "float32", str(tmp_path / "c"), "actor.path", lambda line: None)
    assert json.loads((found / "config.json").read_text())["model_type"] == "qwen3"


def test_no_folder_for_it(file, tmp_path):
    with pytest.raises(ValueError, match=r"cache=null.*set cache"):
        folder_of(str(file), "float32", None, "actor.path", lambda line: None)
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="cannot be converted into the folder cache="):
        folder_of(str(file), "float32", str(tmp_path / "taken"), "actor.path", lambda line: None)


@pytest.mark.slow
def test_a_run_trains_the_model_of_a_file_and_continues(file, tmp_path):
    """`config.yaml` names the file, from which the second command loads the reference again."""
    command = [
        sys.executable, "-m", "rft.main", "actor=hf", f"actor.path={file}", f"cache={tmp_path / 'cache'}",
        "data.template=none", f"output_dir={tmp_path / 'run'}", "batch.prompts=2", "algorithm.group_size=2",
        "rollout.max_new_tokens=4", "data.train.count=8", "data.eval.heldout.count=2", "algorithm/terms=[kl]",
        "actor.optimizer.lr=1e-3",
    ]  # fmt: skip
    first = subprocess.run([*command, "steps=1"], capture_output=True, text=True, timeout=SOON_S)
    assert first.returncode == 0, first.stderr
    assert f"actor.path={file}: converted in" in " ".join(first.stdout.split())
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {config[key]["path"] for key in ("actor", "reference")} == {str(file)}
    second = subprocess.run([*command, "steps=2"], capture_output=True, text=True, timeout=SOON_S)
    assert second.returncode == 0, second.stderr
    assert "converted" not in second.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["stage"] == "train" and row["step"]] == [1, 2]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "latest" / "actor")
    own = new_model().state_dict()
    assert any(not torch.equal(tensor, own[name]) for name, tensor in trained.state_dict().items())
