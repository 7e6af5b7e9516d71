"""One sample whose answer comes in one part or in several."""

import pytest

from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.server_requests import Continued
from rft.rollout.engine.base import row_seed
from rft.rollout.engine.sampling import FirstToken
from rft.rollout.engine.texts import until_stop
from rft.rollout.server.sample_request import SampleOptions, SampleRequest
from rft.rollout.server.server_api import Aborted, ServerPrompt
from rft.rollout.server.vllm import VLLMApi
from tests.rollout.contexts import sampling_of_yaml
from tests.rollout.word_models import word_tokenizer

CLIENT = ServerClient("server 0", "http://127.0.0.1:1")


def request(limit=6, continues=True, oldest=3, newest=4, **sampling):
    options = SampleOptions(VLLMApi({}), [2], sampling_of_yaml(**sampling), oldest, lambda: newest, continues)
    return SampleRequest(ServerPrompt([5, 6]), 77, limit, options)


def answer(tokens, reason, *versions):
    spans = [{"start": place, "end": place + 1, "version": str(one)} for place, one in enumerate(versions)]
    content = [{"token_id": token, "logprob": -token / 10} for token in tokens]
    choice = {"finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
    return {"choices": [choice]}


def test_an_aborted_sample_goes_on_behind_its_tokens_with_another_seed():
    first = request(first_token=FirstToken(30.0, 16))
    assert first.call(CLIENT).body["sampling_params"]["seed"] == 77
    second = first.read(CLIENT, answer([7, 8], "abort", 3, 3))
    assert isinstance(second, Continued)
    body = second.request.call(CLIENT).body
    assert body["token_ids"] == [5, 6, 7, 8]
    assert body["sampling_params"]["max_tokens"] == 4
    assert body["sampling_params"]["seed"] == row_seed(77, 0, 2) != 77
    assert body["sampling_params"]["temperature"] == 1.0, "the first token is there already"
    third = second.request.read(CLIENT, answer([9], "abort", 4))
    assert third.request.call(CLIENT).body["token_ids"] == [5, 6, 7, 8, 9]
    whole = third.request.read(CLIENT, answer([10, 2], "stop", 4, 4))
    assert whole.tokens == [7, 8, 9, 10, 2] and whole.versions == [3, 3, 4, 4, 4] and whole.parts == 3
    assert whole.logprobs == [-0.7, -0.8, -0.9, -1.0, -0.2] and whole.finish_reason == "stop"


def test_a_sample_that_is_aborted_before_its_first_token_begins_again():
    again = request().read(CLIENT, answer([], "abort"))
    assert again.request == request().__class__(ServerPrompt([5, 6]), 77, 6, again.request.options)


def test_the_limit_is_that_of_the_whole_sample():
    second = request(limit=3).read(CLIENT, answer([7, 8], "abort", 3, 3)).request
    assert second.read(CLIENT, answer([9], "length", 4)).tokens == [7, 8, 9]
    with pytest.raises(ValueError, match=r"^length after 4 of 3 tokens"):
        second.read(CLIENT, answer([9, 9], "length", 4, 4))


@pytest.mark.parametrize("versions", [(2, 3), (3, 5), ("default", 3)])
def test_tokens_of_other_versions_are_not_taken(versions):
    with pytest.raises(RequestFailed, match=r"^server 0 serves version (2|5|None), not 3 or later$"):
        request().read(CLIENT, answer([7, 8], "stop", *versions))


def test_without_updates_in_between_a_sample_that_was_aborted_is_lost():
    with pytest.raises(Aborted):
        request(continues=False).read(CLIENT, answer([7, 8], "abort", 3, 3))


def test_a_stop_string_may_begin_in_one_part_and_end_in_the_next():
    tokenizer = word_tokenizer(40)  # "w7 w8 w9 w10"
    assert until_stop(tokenizer, ["w8 w9"], [7, 8, 9, 10]) == 3
    assert until_stop(tokenizer, ["w9"], [7, 8, 9, 10]) == 3
    assert until_stop(tokenizer, ["w11"], [7, 8, 9, 10]) == 4
    assert until_stop(tokenizer, [], [7, 8, 9, 10]) == 4
