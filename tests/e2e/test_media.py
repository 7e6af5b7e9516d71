"""Whole runs of the tiny models that read images and audio: every kind of task, resumed, exported and read again."""

import json
import math
import wave

import pytest
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoModelForMultimodalLM, Qwen2_5OmniConfig

from rft.data.encode.media.without_video import load_processor
from rft.distributed import stop
from rft.errors import Problems
from rft.modes.evaluate import evaluate
from rft.modes.plan.job import PlanJob
from rft.rollout.engine.base import EngineFacts
from rft.rollout.engine.hf import HFEngine
from rft.setup.assembly import Job
from tests.families import family, picture, sound
from tests.families.rows import OMNI

SMALL = (
    "data.train.count=48", "data.eval.heldout.count=8", "warmup=none", "steps=2", "batch.prompts=4",
    "algorithm.group_size=4", "eval.every=2", "checkpoint.every=1",
)  # fmt: skip
GIVEN = tuple(option for option in SMALL if not option.startswith("algorithm.group"))
VISION, AUDIO = ("actor=tiny_vision", "data=shapes"), ("actor=tiny_audio", "data=tones")
RUNS = {
    "grpo": (*VISION, *SMALL),
    "grpo with two images": ("actor=tiny_vision", "data=shapes_several", *SMALL),
    "grpo with audio": (*AUDIO, *SMALL),
    "gspo": (*VISION, "algorithm=gspo", *SMALL),
    "ppo": (*VISION, "algorithm=ppo", *SMALL),
    "dynamic sampling": (*VISION, "algorithm/source=dynamic_sampling", *SMALL),
    "sft": (*VISION, "algorithm=sft", *GIVEN),
    "dpo": (*VISION, "algorithm=dpo", *GIVEN),
    "kto": (*VISION, "algorithm=kto", *GIVEN),
    "lora": (*VISION, "actor/lora=lora", "actor.lora.rank=2", *SMALL),
    "a frozen tower": (*VISION, "actor.frozen=[model.visual.*]", *SMALL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run(name, resolved, tmp_path):
    score = tmp_path / "score.py"
    score.write_text("def score(response, row):\n    return float(sum(map(ord, response)) % 7)\n")
    sampled = (
        () if name in ("sft", "dpo", "kto") else ("reward=function", f"reward.terms.function.function={score}:score")
    )
    config = resolved(*RUNS[name], *sampled, f"output_dir={tmp_path / 'run'}")
    Job(config).fit("")
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = {key: value for row in logged for key, value in row.items() if isinstance(value, float)}
    assert numbers["grad_norm"] > 0 and all(math.isfinite(value) for value in numbers.values())
    if sampled:
        assert numbers["rollout/logprob_gap"] < 1e-4
    exported = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    model = AutoModelForMultimodalLM.from_pretrained(exported)
    assert model.config.model_type == config["actor"]["model_config"]["model_type"]
    assert type(load_processor(str(exported))).__name__.startswith("Qwen2")


def one_module_with_its_head(folder):
    """Options of a run with a Qwen2.5-Omni in a folder as it is published, and rows without media, with an image, a
    sound and both."""
    one, parts = family(OMNI), {"image": "a.png", "audio": "a.wav"}
    one.processor.save_pretrained(folder)
    Qwen2_5OmniConfig(thinker_config=one.config.to_dict()).save_pretrained(folder)
    tensors = {f"thinker.{name}": tensor for name, tensor in one.model().state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    picture(0).save(folder / parts["image"])
    with wave.open(str(folder / parts["audio"]), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((sound(0) * 1000).astype("<i2").tobytes())
    kinds = [("image",), (), ("image", "audio"), ("audio",)]
    asked = [[*({"type": kind, kind: parts[kind]} for kind in own), {"type": "text", "text": "?"}] for own in kinds]
    lines = [json.dumps({"prompt": [{"role": "user", "content": content}], "answer": "2"}) for content in asked]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "heldout.jsonl").write_text(lines[2].replace("?", "!"))
    (folder / "score.py").write_text("def score(response, row):\n    return float(sum(map(ord, response)) % 7)\n")
    return (
        "actor=hf", "actor/processor=pretrained", f"actor.path={folder}", "actor.optimizer.lr=1e-2", "data=questions",
        f"data.train.path={folder / 'rows.jsonl'}", f"data.eval.questions.path={folder / 'heldout.jsonl'}",
        "rollout.max_new_tokens=6", "steps=2", "batch.prompts=4", "algorithm.group_size=4",
        "reward=function", f"reward.terms.function.function={folder / 'score.py'}:score", "checkpoint.every=1",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        (("actor.packing=false", "strategy.activation_checkpointing=full"), {}),
        (("algorithm=ppo",), {}),
        (
            ("actor.frozen=[visual.*]", "actor.optimizer.lr_factors={audio_tower.*: 0.1}"),
            {"visual.": 0, "audio_tower.": 0.1},
        ),
        (("actor/lora=lora", "actor.lora.rank=2"), dict.fromkeys(("visual.", "audio_tower.", "lm_head."), 0)),
    ],
)
def test_a_model_that_is_one_module_with_its_head(changes, factors, resolved, tmp_path):
    """It trains, stops and continues with the same numbers, and its export is read by transformers and by a run."""
    given = (*one_module_with_its_head(tmp_path), *changes)

    def run(name, *options):
        Job(resolved(*given, f"output_dir={tmp_path / name}", *options)).fit("")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        logged = [{k: v for k, v in json.loads(line).items() if isinstance(v, float)} for line in lines]
        assert all(row["rollout/logprob_gap"] < 1e-4 for row in logged if "rollout/logprob_gap" in row)
        return [{k: v for k, v in row.items() if k.startswith(("loss", "reward", "grad"))} for row in logged]

    whole = run("whole")
    run("parts", "steps=1")
    assert run("parts") == whole and any(row.get("grad_norm", 0) > 0 for row in whole)
    exported = tmp_path / "whole" / "checkpoints" / "latest" / "actor"
    trained = AutoModelForMultimodalLM.from_pretrained(exported).state_dict()
    first = family(OMNI).model().state_dict()
    assert trained.keys() == first.keys()
    moved = {
        part: max(float((trained[name] - first[name]).abs().max()) for name in first if name.startswith(part))
        for part in ("model.layers.", "visual.", "audio_tower.", "lm_head.")
    }
    for part, most in moved.items():
        assert most == pytest.approx(factors.get(part, 1) * moved["model.layers."], rel=0.5), part
    assert moved["model.layers."] > 0
    run("again", "steps=1", f"actor.path={exported}")


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_same_numbers(resolved, tmp_path):
    def run(folder, steps):
        Job(resolved(*RUNS["grpo"], f"output_dir={tmp_path / folder}", f"steps={steps}")).fit("")
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [
            {k: v for k, v in json.loads(line).items() if k.startswith(("loss", "reward", "grad"))} for line in lines
        ]

    whole = run("whole", 3)
    run("parts", 1)
    assert run("parts", 3) == whole and len(whole) >= 3


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_its_media(resolved, tmp_path):
    given = (*VISION, *SMALL, f"output_dir={tmp_path / 'run'}")
    Job(resolved(*given)).fit("")
    evaluate(resolved(*given, "mode=evaluate"), Console(quiet=True))
    found = list((tmp_path / "run").rglob("*.json*"))
    assert any("evaluat" in str(path) for path in found)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "term"), [("reward_model", "model"), ("process_reward_model", "process_model")])
def test_a_reward_model_of_rows_with_media_scores_those_of_a_run(algorithm, term, resolved, tmp_path):
    small = [option for option in GIVEN if not option.startswith("steps")]
    trained, run = tmp_path / "scorer", tmp_path / "run"
    Job(resolved(*VISION, f"algorithm={algorithm}", *small, "steps=1", f"output_dir={trained}")).fit("")
    exported = trained / "checkpoints" / "latest" / "actor"
    processor = load_processor(str(exported))
    ends = processor.tokenizer("a").input_ids[-1] == processor.tokenizer.eos_token_id
    assert ends == (term == "model")
    scored = (f"reward/terms=[exact_match,{term}]", f"reward.terms.{term}.path={exported}")
    Job(resolved(*VISION, *SMALL, "steps=1", *scored, f"output_dir={run}")).fit("")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last[f"reward/{term}"] != 0 and last["grad_norm"] > 0
    config = resolved("actor=tiny_vision", f"algorithm={algorithm}", f"output_dir={run}")
    with pytest.raises(ValueError, match=r"actor\.model_config: a qwen2_5_vl reads more than text; set"):
        Job(config | {"actor": config["actor"] | {"processor": None}}).fit("")


class TextEngine(HFEngine):
    """An engine of a user that takes no media."""

    facts = EngineFacts()


def test_media_need_a_processor_and_an_engine_that_takes_them(resolved, tmp_path):
    folder = f"output_dir={tmp_path / 'run'}"
    own = "rollout.engine._target_=tests.e2e.test_media.TextEngine"
    with pytest.raises(ValueError, match=r"actor\.processor: TextEngine samples from prompts of text alone; set roll"):
        Job(resolved(*RUNS["grpo"], folder, own))
    with pytest.raises(Problems) as caught:
        Job(resolved("data=shapes", "data.train.count=8", "data.eval.heldout.count=8", "warmup=none", folder)).fit("")
    said = "row 1: message 0 has image, and the model of this run reads text alone; choose a model with a processor"
    assert [message.partition(" that reads it")[0] for message in caught.value.messages] == [
        f"data.train: {said}",
        f"data.eval.heldout: {said}",
    ]
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>?", "images": ["a.png"], "answer": "2"}))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "?", "answer": "2"}))
    files = (f"data.train.path={tmp_path / 'rows.jsonl'}", f"data.eval.questions.path={tmp_path / 'held.jsonl'}")
    with pytest.raises(Problems, match=r"data\.train: .*rows\.jsonl line 1: message 0 has image, and the model of"):
        Job(resolved("data=questions", *files, "data.template=none", "warmup=none", folder)).fit("")
    with pytest.raises(Problems) as caught:  # before the processor has counted the tokens of all rows
        Job(resolved(*RUNS["grpo"], "actor.frozen=[foo]", "data.max_prompt_tokens=1", folder)).fit("")
    assert [message.partition(":")[0] for message in caught.value.messages] == ["actor.frozen[0]='foo'"]
    server = ("rollout.engine.servers.count=0", "rollout.engine.servers.addresses=[127.0.0.1:9]", "cache=null")
    with pytest.raises(Problems) as caught:  # its model computes the padding of sounds
        Job(resolved(*RUNS["grpo with audio"], "rollout=sglang", *server, folder)).fit("")
    for message, key in zip(caught.value.messages, ("data.train", "data.eval.heldout"), strict=True):
        assert message.startswith(f"{key}: row 1: the engine gets no audio: it computes the padding too, and would")
    stop()  # the plan simulates a process group of its own
    with pytest.raises(ValueError, match=r"mode=plan: the memory of media \(actor\.processor\) is not counted"):
        PlanJob(resolved(*RUNS["grpo"], folder, "mode=plan"), 1)
    with pytest.raises(ValueError, match=r"strategy\.tensor_parallel=2: the actor takes media"):
        Job(resolved(*RUNS["grpo"], folder, "strategy.tensor_parallel=2"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("given", "suffix", "tag"), [(VISION, "png", "<img"), (AUDIO, "wav", "<audio")])
def test_sampled_texts_have_their_media_and_answers_are_scored_again(given, suffix, tag, resolved, tmp_path):
    """Each medium is a file of the run once; the report shows it; `evaluate.responses` reads the answers again."""
    options = (*given, *SMALL, "steps=1", "trajectories.every=1", f"output_dir={tmp_path / 'run'}")
    Job(resolved(*options)).fit("")
    texts = (tmp_path / "run" / "trajectories" / "step_00000001.jsonl").read_text()
    rows = [json.loads(line) for line in texts.splitlines()]
    named = [row["prompt"][0]["content"][0] for row in rows]
    files = [tmp_path / "run" / "trajectories" / part[part["type"]] for part in named]
    assert all(file.is_file() and file.suffix == f".{suffix}" for file in files)
    assert len({file.name for file in files[:16]}) == 4, "four prompts with four answers each"
    assert tag in (tmp_path / "run" / "report.html").read_text()
    first = evaluate(resolved(*options, "mode=evaluate"), Console(quiet=True))
    answers = tmp_path / "run" / "answers.jsonl"
    [line, *_] = map(json.loads, answers.read_text().splitlines())
    part = line["prompt"][0]["content"][0]
    assert (tmp_path / "run" / part[part["type"]]).is_file()
    again = resolved(*options, "mode=evaluate", f"evaluate.responses={answers}")
    assert evaluate(again, Console(quiet=True)) == first
