"""The experts that engines chose lie in a pack where their tokens lie, whatever its layout; missing ones are named."""

import dataclasses
import re

import msgspec
import numpy as np
import pytest
import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import GroupPart, encode_experts, encode_tokens
from megatron_rl.trainer.data.batch import Batcher
from megatron_rl.trainer.data.routing import lay_out_routing
from megatron_rl.types import Architecture, Experts
from tests.unit.test_slots import response, slot

LAYERS, ACTIVE = 3, 2
MODEL = Architecture("glm4_moe", LAYERS, 8, 8, 2, 2, 4, 1000, 64, experts=Experts(16, ACTIVE, 4, num_dense_layers=1))


def experts_of(group: int, sequence: int, first: int, num_tokens: int, num_experts: int = 16) -> np.ndarray:
    """Return experts that differ between tokens, sequences and layers: those of the tokens from position `first` on."""
    token = np.arange(first, first + num_tokens)[:, None]
    layer = np.arange(LAYERS)[None, :]
    head = (7 * group + 5 * sequence + 3 * token + layer) % num_experts
    found = np.stack([head, (head + 1 + token % 3) % num_experts], axis=-1)
    return found.astype(np.uint8 if num_experts <= 256 else np.uint16)


def make_part(group: int, num_prompt: int, lengths: list[int], first: int = 0, num_experts: int = 16) -> GroupPart:
    """Make the part of a group with these responses; the prompt's experts count as those of sequence 0."""
    responses = [
        msgspec.structs.replace(
            response(length, 0.0),
            experts=encode_experts(experts_of(group, first + number + 1, num_prompt, length - 1, num_experts)),
        )
        for number, length in enumerate(lengths)
    ]
    return GroupPart(
        prompt_index=group, row="", prompt_tokens=encode_tokens([group] * num_prompt), first_response=first,
        responses=responses, rewards=[0.0] * len(lengths),
        prompt_experts=encode_experts(experts_of(group, 0, 0, num_prompt, num_experts)),
    )  # fmt: skip


@pytest.mark.parametrize("num_experts", [16, 300])
@pytest.mark.parametrize("is_shared", [True, False])
def test_each_token_has_the_experts_of_its_place_in_its_sequence(is_shared: bool, num_experts: int) -> None:
    model = dataclasses.replace(MODEL, experts=dataclasses.replace(MODEL.experts, num_experts=num_experts))
    parts = [make_part(0, 4, [3, 1, 5], 0, num_experts), make_part(1, 2, [2, 6], 2, num_experts)]
    batcher = Batcher(lambda part: np.zeros(8), multiple_of=16, is_shared=is_shared, replayed=model)
    pack = batcher.batch(slot(parts=parts)).pack
    routing = pack.routing
    assert routing.experts_TLK.dtype == (torch.uint8 if num_experts <= 256 else torch.int16)
    # By definition: a token's group, sequence and position give its experts.
    row, wanted = 0, []
    for group, part in enumerate(parts):
        num_prompt = len(part.prompt_tokens) // 4
        for number, one in enumerate(part.responses):
            sequence = part.first_response + number + 1
            if not number or not is_shared:
                wanted += [(row + i, group, 0, i) for i in range(num_prompt)]
                row += num_prompt
            length = len(one.tokens) // 4
            wanted += [(row + i, group, sequence, num_prompt + i) for i in range(length - 1)]
            row += length
    assert row <= pack.num_tokens
    assert routing.is_known_T.nonzero()[:, 0].tolist() == [row for row, *_ in wanted]
    for row, group, sequence, position in wanted:
        expected = experts_of(group, sequence, position, 1, num_experts)[0].astype(np.int64)
        assert routing.experts_TLK[row].long().tolist() == expected.tolist()


def test_a_batch_without_replay_has_no_routing() -> None:
    assert Batcher(lambda part: np.zeros(8)).batch(slot(parts=[make_part(0, 4, [3])])).pack.routing is None


def changed(**changes) -> GroupPart:
    part = make_part(3, 4, [3])
    of_response = {name: changes.pop(name) for name in ("experts",) if name in changes}
    responses = [msgspec.structs.replace(part.responses[0], **of_response)]
    return msgspec.structs.replace(part, responses=responses, **changes)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (changed(experts=msgspec.UNSET), "prompt 3, engine 0, has the experts of 0 tokens, and must have those of 2"),
        (changed(prompt_experts=msgspec.UNSET), "prompt 3, its prompt, has the experts of 0 tokens"),
        (changed(experts=encode_experts(experts_of(3, 1, 4, 3))), "has the experts of 3 tokens, and must have those"),
        (changed(experts=b"12345"), "has 5 bytes of experts, which are not those of whole tokens in 3 layers with 2"),
        (changed(experts=bytes([1, 16] * 6)), "has expert 16, and the model has 16"),
        (changed(experts=bytes([1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 5, 5])), "the same expert twice for token 1 in layer 2"),
    ],
)  # fmt: skip
def test_experts_that_are_missing_or_are_none_of_the_models_are_named(part: GroupPart, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        lay_out_routing([part], MODEL, True, 8)


def test_dense_layers_need_no_experts() -> None:
    of_response = experts_of(3, 1, 4, 2)
    of_response[:, 0] = 0
    routing = lay_out_routing([changed(experts=encode_experts(of_response))], MODEL, True, 8)
    assert routing.experts_TLK[4:6, 0].tolist() == [[0, 0], [0, 0]]
