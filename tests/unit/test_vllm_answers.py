"""A change that vLLM would make by clamping, dropping or cutting off is found in its answer, or never requested."""

import asyncio
import math
import re

import msgspec
import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.provenance import GroupRefused, check_group, derive_group_seed
from megatron_rl.shared.protocol.wire import (
    Group,
    Plan,
    Prompt,
    Response,
    Sampling,
    Submission,
    decode_log_probs,
    decode_tokens,
    encode_log_probs,
    encode_tokens,
)
from megatron_rl.sidecar.engines import EngineRefused, GroupRequest
from megatron_rl.sidecar.vllm.answers import Limits, build_call, build_sampling_params, read_responses
from megatron_rl.sidecar.vllm.routes import GroupAnswer, GroupChoice, GroupSpan

LIMITS = Limits(max_model_len=32, max_num_seqs=4, vocab_size=100, eos_token_ids=(7,))
TAG = "3:abc"


def request(**changes) -> GroupRequest:
    settings = {
        "request_id": "r",
        "prompt_tokens": (1, 2),
        "group_size": 2,
        "seed": 5,
        "sampling": Sampling(max_tokens=3),
    }
    return GroupRequest(**{**settings, **changes})


def choice(index: int = 0, tokens: tuple[int, ...] = (4, 5, 6), **changes) -> GroupChoice:
    settings = {
        "finish_reason": "length",
        "tokens": encode_tokens(tokens),
        "log_prob_tokens": encode_tokens(tokens),
        "log_probs": encode_log_probs([-1.5] * len(tokens)),
        "spans": [GroupSpan(TAG, 0, len(tokens))],
    }
    return GroupChoice(index=index, **{**settings, **changes})


def answered(*choices: GroupChoice, **changes):
    answer = msgspec.msgpack.decode(msgspec.msgpack.encode(GroupAnswer(list(choices))), type=GroupAnswer)
    return read_responses(answer, request(**changes), "engine-0", 3, TAG)


def test_a_good_answer_becomes_responses_with_their_provenance():
    first, second = answered(choice(1, (8, 7), finish_reason="stop"), choice(0))
    assert (first.seed, second.seed) == (5, 6)
    assert decode_tokens(second.tokens).tolist() == [8, 7]
    assert decode_log_probs(first.log_probs).tolist() == [-1.5] * 3
    assert (first.engine, first.fingerprint, first.spans[0].version) == ("engine-0", "abc", "3")
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")


def with_experts(prompt: bytes | None, *experts: bytes | None) -> list[Response]:
    choices = [choice(number, experts=one) for number, one in enumerate(experts)]
    return read_responses(GroupAnswer(choices, prompt_experts=prompt), request(), "engine-0", 3, TAG, True)


def test_experts_come_with_each_response_and_those_of_the_prompt_once():
    first, second = with_experts(b"aabb", b"ccdd", b"eeff")
    assert (first.prompt_experts, first.experts) == (b"aabb", b"ccdd")
    assert (second.prompt_experts, second.experts) == (msgspec.UNSET, b"eeff")
    (plain, _) = answered(choice(0, experts=b"ccdd"), choice(1))
    assert (plain.experts, plain.prompt_experts) == (msgspec.UNSET, msgspec.UNSET)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, b"ccdd", b"eeff"), "r has 0 bytes of experts for the 2 tokens of its prompt"),
        ((b"aab", b"ccdd", b"eeff"), "r has 3 bytes of experts for the 2 tokens of its prompt"),
        (
            (b"aabb", b"ccdd", None),
            "choice 1 of request r has 0 bytes of experts, and must have 2 for each of 2",
        ),
        ((b"aabb", b"ccdd", b"eeffgg"), "choice 1 of request r has 6 bytes of experts"),
    ],
)
def test_an_answer_without_the_experts_of_a_token_is_refused(given, message):
    with pytest.raises(EngineRefused, match=message):
        with_experts(*given)


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        ((4, 5, 6), {"finish_reason": "abort"}, "was cut off"),
        ((4, 5, 6), {"finish_reason": "error"}, "was cut off"),
        ((4, 5, 6), {"finish_reason": None}, "was cut off"),
        ((4, 5), {"finish_reason": "length"}, "'length' after 2 tokens, with max_tokens 3"),
        ((4, 5, 6, 7), {}, "after 4 tokens, with max_tokens 3"),
        ((), {"finish_reason": "stop"}, "after 0 tokens"),
        ((4, 5, 6), {"log_probs": b"", "log_prob_tokens": b""}, "log-probs for 0 tokens"),
        ((4, 5, 6), {"log_prob_tokens": encode_tokens([4])}, "log-probs for 1 tokens that are not its own 3"),
        ((4, 5, 6), {"log_probs": encode_log_probs([-1.0])}, "log-probs for 3 tokens that are not its own 3"),
        ((4, 5, 6), {"log_prob_tokens": encode_tokens([4, 6, 5])}, "are not its own 3 tokens"),
        ((4, 5, 6), {"log_probs": encode_log_probs([-1, -math.inf, -1])}, "-inf for the log-prob of token 5"),
        ((4, 5, 6), {"log_probs": encode_log_probs([-1, -1, math.nan])}, "nan for the log-prob of token 6"),
        ((4, 5, 6), {"log_probs": encode_log_probs([0.5, -1, -1])}, "0.5 for the log-prob of token 4"),
        ((4, 5, 6), {"spans": None}, "does not say which weights"),
    ],
)
def test_an_incomplete_answer_is_refused(tokens, changes, message):
    with pytest.raises(EngineRefused, match=message):
        answered(choice(0), choice(1, tokens, **changes))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "its spans end at token 0 of 3"),
        ([GroupSpan("2:abc", 0, 3)], "tokens 0 to 3 have version '2:abc', wanted '3'"),
        ([GroupSpan("3:other", 0, 3)], "tokens 0 to 3 have version '3:other', wanted '3'"),
        ([GroupSpan(TAG, 0, 2), GroupSpan("2:abc", 2, 3)], "tokens 2 to 3 have version '2:abc'"),
        ([GroupSpan(TAG, 0, 2)], "its spans end at token 2 of 3"),
        ([GroupSpan(TAG, 1, 3)], "the span of tokens 1 to 3 must start at token 0"),
    ],
)
def test_a_group_whose_tokens_are_not_all_of_the_version_is_refused_by_who_makes_it(spans, message):
    prompt = Prompt(index=0, row="0", tokens=encode_tokens([1, 2]))
    seed = derive_group_seed("run", 3, 0)
    asked = Submission(
        run="run", version=3, fingerprint="abc", sampling=Sampling(max_tokens=3), prompts=[prompt],
        plan=Plan(num_prompts=1, group_size=2, num_replicas=1, micro_batch_size=2), deadline_seconds=60.0,
    )  # fmt: skip
    check_group(asked, Group(prompt=prompt, responses=answered(choice(0), choice(1), seed=seed)))
    responses = answered(choice(0), choice(1, spans=spans), seed=seed)
    with pytest.raises(GroupRefused, match=re.escape(f"response 1 of engine engine-0: {message}")):
        check_group(asked, Group(prompt=prompt, responses=responses))


@pytest.mark.parametrize("spans", [None, []])
def test_a_response_that_was_cut_before_it_began_is_empty_and_only_where_a_cut_was_asked_for(spans):
    empty = choice(0, (), finish_reason="abort", spans=spans)
    (response,) = answered(empty, group_size=1, cut=asyncio.Event())
    assert (response.finish_reason, response.tokens) == ("cut", b"")
    with pytest.raises(EngineRefused, match="was cut off: its finish reason is 'abort'"):
        answered(empty, group_size=1)


def test_a_group_with_a_response_missing_or_double_is_refused():
    with pytest.raises(EngineRefused, match="choices .0., and 2 were asked for"):
        answered(choice(0))
    with pytest.raises(EngineRefused, match="choices .0, 0."):
        answered(choice(0), choice(0))


def test_every_field_of_the_sampling_reaches_vllm():
    plain = build_sampling_params(Sampling(max_tokens=3), LIMITS)
    changes = {"max_tokens": 9, "temperature": 0.5, "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 1}
    # Turns are the sidecar's: an engine samples one at a time.
    assert {*changes, "max_turns"} == set(Sampling.__struct_fields__)
    for field, value in changes.items():
        changed = build_sampling_params(Sampling(**{"max_tokens": 3, field: value}), LIMITS)
        assert changed[field] != plain[field]


def test_sampling_options_that_change_the_distribution_are_switched_off_by_name():
    params = build_sampling_params(Sampling(max_tokens=3), LIMITS)
    assert (params["top_p"], params["top_k"], params["min_p"]) == (1.0, 0, 0.0)
    assert (params["presence_penalty"], params["frequency_penalty"], params["repetition_penalty"]) == (0.0, 0.0, 1.0)


def test_the_end_of_a_response_is_named_because_vllm_has_no_tokenizer():
    assert build_sampling_params(Sampling(max_tokens=3, stop_token_ids=[9]), LIMITS)["stop_token_ids"] == [7, 9]
    assert build_sampling_params(Sampling(max_tokens=3, ignore_eos=True), LIMITS)["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": tuple(range(30))}, "30 tokens and 3 more exceed the engines' 32"),
        ({"prompt_tokens": ()}, "empty prompt"),
        ({"prompt_tokens": (1, 100)}, "token 100 of the prompt is not one of the model's 100"),
        ({"prompt_tokens": (-1, 1)}, "token -1 of the prompt"),
        ({"group_size": 5}, "5 responses are more than the 4"),
        ({"group_size": 0}, "0 responses"),
        ({"sampling": Sampling(max_tokens=0)}, "of 0 tokens"),
    ],
)
def test_a_request_that_vllm_would_clamp_is_an_error_of_the_user(changes, message):
    with pytest.raises(InputError, match=message):
        build_call(request(**changes), LIMITS, TAG)


def test_the_prefix_cache_is_salted_with_the_weights():
    assert build_call(request(), LIMITS, TAG).cache_salt == TAG
