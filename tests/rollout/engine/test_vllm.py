"""The real engine, where it is installed; it brings weeks of its own code, so these tests are slow ones."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rft.distributed import start
from rft.registry import Target
from rft.rollout.engine.base import Request
from rft.rollout.engine.sampling import FirstToken, Sampling, truncate
from rft.rollout.engine.vllm import VLLMEngine
from rft.setup.classes import CONTEXT
from rft.strategy.gather import GatherOptions
from tests.conftest import ENDS_S
from tests.e2e.test_conversations import learn_chats
from tests.e2e.test_tool_formats import CALLS, check_calls, learn_calls, tool_run
from tests.families.rows import encoder, rows
from tests.helpers import engine_context
from tests.rollout.contexts import engine_check_context
from tests.rollout.media import check_samples_with_media, family_for_vllm
from tests.rollout.server.real_servers import until
from tests.rollout.word_models import END, word_tokenizer

VOCABULARY = 64
PLAIN = Sampling(8, 1.0, 1.0, 0, 0.0, [], None)
OPTIONS = VLLMEngine.Options(sleep_level=None, merge_lora=True)
RUN = ("rollout=vllm", "+rollout.engine_args.enforce_eager=true")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def model(seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, eos_token_id=END, initializer_range=0.2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(VOCABULARY)


@pytest.fixture(scope="module")
def engine(tokenizer, tmp_path_factory):
    arguments = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.1}
    context = engine_context(model(), tokenizer, tmp_path_factory.mktemp("run"), start("cpu"), **arguments)
    built = VLLMEngine(OPTIONS, context)
    yield built
    built.close()


def off(policy, request, answer, how):
    """The largest difference of the log-probabilities from those of transformers."""
    ids = torch.tensor([request.prompt + answer.tokens])
    with torch.no_grad():
        logits = policy(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
    weights = torch.softmax(logits / (how.temperature or 1.0), -1)
    if how.temperature:
        weights = truncate(weights, how.top_k, how.top_p, how.min_p)
    said = (weights / weights.sum(-1, keepdim=True)).log().gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return float((said - torch.tensor(answer.logprobs)).abs().max())


@needs_vllm
@pytest.mark.slow
def test_it_samples_what_transformers_computes_after_every_update(engine):
    assert engine.gather_options == GatherOptions(torch.float32), "its own dtype"
    requests = [Request([5, 6, 7], [11, 12]), Request([9], [13]), Request(list(range(3, 40)), [14, 15, 16])]
    hows = [
        PLAIN,
        Sampling(8, 0.7, 1.0, 0, 0.0, [], None),
        Sampling(8, 0.0, 1.0, 0, 0.0, [], None),
        Sampling(8, 1.3, 1.0, 5, 0.0, [], None),
        Sampling(8, 1.0, 0.6, 9, 0.0, [], None),
        Sampling(8, 1.0, 1.0, 0, 0.2, [], None),
    ]
    for version in (0, 1, 2):
        policy = model(seed=version)
        engine.update_weights(version, iter(policy.state_dict().items()))
        for how in hows:
            announced = {}
            found = engine.generate(
                requests, how, lambda request, sample, one, seen=announced: seen.update({(request, sample): one})
            )
            assert [len(group) for group in found] == [2, 1, 3]
            assert announced == {(i, j): one for i, group in enumerate(found) for j, one in enumerate(group)}
            for request, group in zip(requests, found, strict=True):
                for answer in group:
                    assert answer.versions == [version] * len(answer.tokens)
                    assert answer.finish_reason == ("stop" if answer.tokens[-1] == END else "length")
                    assert off(policy, request, answer, how) < 1e-5
        assert found != engine.generate([Request(r.prompt, [s + 1 for s in r.seeds]) for r in requests], how)


@needs_vllm
@pytest.mark.slow
def test_a_sample_is_a_function_of_prompt_and_seed(engine):
    engine.update_weights(7, iter(model().state_dict().items()))
    together = engine.generate([Request([5, 6], [1, 2, 3]), Request([8], [4])], PLAIN)
    alone = engine.generate([Request([5, 6], [3])], PLAIN)
    assert alone[0][0].tokens == together[0][2].tokens
    assert len({tuple(answer.tokens) for answer in together[0]}) > 1


@needs_vllm
@pytest.mark.slow
def test_more_prompt_tokens_than_a_step_takes_change_no_sample(engine):
    """A CPU's generators cannot take back the draw of a prompt of which a step computes a part."""
    engine.update_weights(7, iter(model().state_dict().items()))
    most = engine._engine.vllm_config.scheduler_config.max_num_batched_tokens
    requests = [Request([5 + n] * 240, [n]) for n in range(most // 240 + 6)]
    together = engine.generate(requests, PLAIN)
    for number in (0, len(requests) // 2, len(requests) - 1):
        [alone] = engine.generate([requests[number]], PLAIN)
        assert [one.tokens for one in alone] == [one.tokens for one in together[number]]
        assert off(model(), requests[number], alone[0], PLAIN) < 1e-4


@needs_vllm
@pytest.mark.slow
def test_limits_and_stop_strings(engine):
    engine.update_weights(8, iter(model().state_dict().items()))
    [[short, long]] = engine.generate([Request([5, 6], [1, 2], limits=[1, 5])], PLAIN)
    assert len(short.tokens) == 1 and len(long.tokens) <= 5
    [[free]] = engine.generate([Request([5, 6], [3])], PLAIN)
    stop = f"w{free.tokens[2]}"
    [[stopped]] = engine.generate([Request([5, 6], [3])], Sampling(8, 1.0, 1.0, 0, 0.0, [stop], None))
    cut = next(place for place, token in enumerate(free.tokens) if f"w{token}".startswith(stop)) + 1
    assert stopped.tokens == free.tokens[:cut] and stopped.finish_reason == "stop" and stop not in stopped.text


@needs_vllm
@pytest.mark.slow
def test_weights_that_the_policy_does_not_send_are_named(engine):
    weights = model().state_dict()
    with pytest.raises(ValueError, match=r"rollout\.engine: vLLM's model has weights .*: model\.norm\.weight\. "):
        engine.update_weights(9, iter((name, weights[name]) for name in weights if name != "model.norm.weight"))
    engine.update_weights(9, iter(weights.items()))


@needs_vllm
@pytest.mark.slow
def test_heads_that_a_cpu_has_no_attention_for_are_refused(tokenizer, tmp_path):
    small = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, hidden_size=48, num_attention_heads=2, head_dim=24))
    with pytest.raises(ValueError, match=r"actor.model_config.head_dim=24: on a CPU vLLM has attention for 32, 64"):
        VLLMEngine(OPTIONS, engine_context(small, tokenizer, tmp_path, start("cpu"), gpu_memory_utilization=0.1))


@needs_vllm
@pytest.mark.slow
def test_a_cpu_cannot_sleep(engine, tokenizer, tmp_path):
    assert engine.sleep_level == 0
    with pytest.raises(ValueError, match=r"rollout.engine.sleep_level=2.*set null"):
        VLLMEngine(replace(OPTIONS, sleep_level=2), engine_context(model(), tokenizer, tmp_path, start("cpu")))


@pytest.fixture
def with_media(monkeypatch, tmp_path):
    """Makes a tiny model of a family, its encoder, and the engine."""
    made = []

    def make(name):
        one = family_for_vllm(name, monkeypatch)
        if name == "llava":  # vLLM scales with torchvision, and the test with Pillow
            one.processor.image_processor.do_resize = False
        elif name == "gemma3":
            one.config.text_config.head_dim = 32
        encode = encoder(one)
        encode.processor.keeps_raw = VLLMEngine.facts.has_processor
        arguments = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.2}  # beside another engine
        context = engine_context(one.model(), encode.processor.tokenizer, tmp_path, start("cpu"), **arguments)
        made.append(VLLMEngine(OPTIONS, replace(context, media=encode.media_facts)))
        return one, encode, made[0]

    yield make
    for engine in made:
        engine.close()


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "qwen2_audio"])  # of the last two vLLM knows other names
def test_prompts_with_media_are_sampled_as_transformers_computes_them(name, with_media):
    one, encode, engine = with_media(name)
    requests = [Request(prompt, [11, 12]) for prompt in encode.prompts(rows(one))]
    check_samples_with_media(one, encode, engine, requests, PLAIN, (0, 1))
    if name == "llava":
        engine._names = {}  # as of a family that it does not know by the names of checkpoints either
        with pytest.raises(ValueError, match=r"by other names \(.*vision_tower\.embeddings.*set rollout=hf"):
            engine.update_weights(2, iter(one.model(2).state_dict().items()))


@needs_vllm
@pytest.mark.slow
def test_attention_in_both_directions_is_refused_on_a_cpu(with_media):
    with pytest.raises(ValueError, match=r"in Gemma3\w+ each token of a medium attends to all.*set rollout=hf"):
        with_media("gemma3")


def environment():
    """Of a process with vLLM."""
    return os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def run(folder, command, *overrides):
    """Runs the main job in a process of its own and returns its steps."""
    words = [*command, "-m", "rft.main", *RUN, f"output_dir={folder}/run", *overrides]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=ENDS_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@needs_vllm
@pytest.mark.slow
def test_the_built_in_task_is_learned(tmp_path):
    rows = run(tmp_path, [sys.executable], "steps=30")
    assert rows[-1]["eval/heldout/accuracy"] > 0.95
    assert max(row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row) < 1e-4


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("format", sorted(CALLS))
def test_the_tool_task_trains_in_the_format_of_its_template(format, resolved, tmp_path):
    run(tmp_path, [sys.executable], *tool_run(learn_calls(resolved, tmp_path, format)))
    check_calls(tmp_path / "run")


@needs_vllm
@pytest.mark.slow
def test_a_model_of_images_samples_what_it_trains(tmp_path):
    """On a CPU vLLM has no attention for heads of 16 numbers."""
    text = "actor.model_config.text_config"
    heads = (f"{text}.num_attention_heads=2", f"{text}.num_key_value_heads=2")
    rotary = f"{text}.rope_parameters.mrope_section=[4,6,6]"
    small = ("warmup=none", "steps=2", "batch.prompts=4", "algorithm.group_size=4", "data.eval.heldout.count=8")
    rows = run(tmp_path, [sys.executable], "actor=tiny_vision", "data=shapes", *heads, rotary, *small)
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 2 and max(gaps) < 1e-4


@needs_vllm
@pytest.mark.slow
def test_a_mixture_of_experts_is_sampled_as_it_is_trained(tmp_path):
    """vLLM itself packs experts for the CPU at the first load only."""
    experts = ("num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=32")
    words = [f"+actor.model_config.{word}" for word in experts]
    words += ["~actor.model_config.head_dim", "actor.model_config.hidden_size=128", "warmup=none", "steps=3"]
    rows = run(tmp_path, [sys.executable], "actor.model_config.model_type=qwen3_moe", *words)
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-4


ALONE = """
import json, sys
from vllm import LLM

llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, gpu_memory_utilization=0.1)
asked = [[{"role": "user", "content": f"reverse {number}="}] for number in sys.argv[2:]]
for answered in llm.chat(asked, use_tqdm=False):
    print(json.dumps([answered.outputs[0].finish_reason, answered.outputs[0].token_ids]))
"""


@needs_vllm
@pytest.mark.slow
def test_a_base_model_that_has_learnt_chats_stops_where_they_end(resolved, tmp_path):
    """In vLLM alone, which loads the exported folder, and the sampling parameters from it."""
    folder = learn_chats(resolved, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id != end
    words = [sys.executable, "-c", ALONE, str(folder), "1234", "7080", "9915"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=ENDS_S)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [(reason, tokens[-1]) for reason, tokens in answers] == [("stop", end)] * 3
    assert all(len(tokens) < 8 for _, tokens in answers)


@pytest.fixture
def shared_memory_of_a_killed_run():
    """What vLLM finds where it shares memory by its own names after a run was killed, and what others have left."""
    left = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in range(2)]
    for file in left:
        file.touch()
    yield {*Path("/dev/shm").glob("*-tp:*")}
    for file in left:
        file.unlink(missing_ok=True)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("ranks_an_engine", [1, 2])
def test_two_ranks_sample_what_they_train(ranks_an_engine, tmp_path, sized, shared_memory_of_a_killed_run):
    small = [word for word in sized("warmup=none") if "head_dim" not in word]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tensor_parallel = f"+rollout.engine_args.tensor_parallel_size={ranks_an_engine}"
    memory = "rollout.engine_args.gpu_memory_utilization=0.1"
    rows = run(tmp_path, torchrun, *small, tensor_parallel, memory, "actor.optimizer.lr=0.01")
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    assert rows[-1]["staleness/mean"] == 0
    # nothing stays; what another test's run makes at this moment is soon gone
    until(lambda: not {*Path("/dev/shm").glob("*-tp:*")} - shared_memory_of_a_killed_run, 60)


@pytest.mark.parametrize(
    ("arguments", "sampling", "message"),
    [
        ({"model": "x"}, PLAIN, r"rollout.engine_args.model: .*take it out"),
        ({"speculative_config": {"method": "ngram"}}, PLAIN, r"rollout.engine_args.speculative_config: .*take it out"),
        ({}, Sampling(8, 0.001, 1.0, 0, 0.0, [], None), "temperature=0.001"),
        ({}, Sampling(8, 2.5, 1.0, 0, 0.0, [], None), "temperature=2.5"),
        ({}, Sampling(8, 1.0, 0.9, 0, 0.1, [], None), "min_p=0.1 with top_p=0.9"),
        ({}, Sampling(8, 1.0, 1.0, 0, 0.0, [], FirstToken(30.0, 4)), "first_token"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_it_starts(arguments, sampling, message):
    with pytest.raises(ValueError, match=message):
        OPTIONS.check(engine_check_context(sampling, engine_args=arguments))
        VLLMEngine.check_sampling(sampling, logprobs=True)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_missing_package_is_named_with_the_cure():
    with pytest.raises(ValueError, match=r"vllm is not installed; install it with `pip install 'rft\[vllm\]'`"):
        OPTIONS.check_here()


def test_the_yaml_fits_the_class(resolved):
    node = resolved("rollout=vllm")["rollout"]
    options = Target(node["engine"], "rollout.engine", CONTEXT).options
    assert options == OPTIONS
    assert node["engine_args"]["dtype"] == "float32"
    assert resolved("rollout=vllm", "strategy.dtype=bfloat16")["rollout"]["engine_args"]["dtype"] == "bfloat16"
