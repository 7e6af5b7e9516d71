"""What vLLM gets for a model with a processor; the engine itself is tested in `test_vllm.py`."""

from rft.batch.encoded import EncodedText, RawText
from rft.rollout.engine.vllm_media import media_arguments, vllm_prompt
from tests.families import family
from tests.families.rows import encoder, rows


def test_a_prompt_with_media_is_sent_as_it_was_before_the_expansion():
    picture = object()
    answer = [3]
    prompt = EncodedText([1, 4, 4, 2], raw=RawText([1, 4, 2], {"image": [picture]})) + answer
    assert vllm_prompt(prompt) == {"prompt_token_ids": [1, 4, 2, 3], "multi_modal_data": {"image": [picture]}}
    assert vllm_prompt([1, 2]) == {"prompt_token_ids": [1, 2]}


def test_the_raw_form_is_kept_for_such_an_engine_alone():
    one = family("qwen2_5_vl")
    encode = encoder(one)
    assert all(prompt.raw is None for prompt in encode.prompts(rows(one)))
    encode.processor.keeps_raw = True
    [single, text, double, quoted] = encode.prompts(rows(one))
    assert text.raw is None and quoted.raw is None
    image = one.placeholders["image"]
    for prompt, count in ((single, 1), (double, 2)):
        assert prompt.raw.ids.count(image) == count == len(prompt.raw.media["image"]) < prompt.count(image)
        assert [token for token in prompt if token != image] == [token for token in prompt.raw.ids if token != image]


def test_other_media_are_refused():
    media = encoder(family("qwen2_5_vl")).media_facts
    assert media_arguments(media)["limit_mm_per_prompt"] == {"audio": 0, "video": 0}
    assert media_arguments(None) == {}
