"""Which backend of shared-prompt attention a run gets, and what is said when it cannot have the one it asked for."""

import dataclasses
from typing import get_args, get_type_hints

import pytest
import torch

from megatron_rl.config.settings import AttentionConfig
from megatron_rl.errors import UsageError
from megatron_rl.ops.shared_prompt import BACKENDS, Choice, Conditions, choose_backend

CPU = Conditions("cpu", torch.float32)
CUDA = Conditions("cuda", torch.bfloat16)


def test_the_flag_offers_auto_and_every_backend() -> None:
    assert get_args(get_type_hints(AttentionConfig)["backend"]) == ("auto", *BACKENDS)


@pytest.mark.parametrize(
    ("conditions", "name"),
    [
        (CPU, "merge"),
        (dataclasses.replace(CPU, window=4), "gather"),
        (dataclasses.replace(CPU, dtype=torch.bfloat16), "merge"),
        (CUDA, "merge"),
        (dataclasses.replace(CUDA, window=4), "gather"),
        (dataclasses.replace(CUDA, dtype=torch.float32), "gather"),
        (Conditions("npu", torch.bfloat16), "merge"),
        (Conditions("npu", torch.bfloat16, window=4), "naive"),
        (Conditions("npu", torch.float32), "naive"),
    ],
)
def test_auto_takes_the_first_that_can_run_and_says_why(conditions: Conditions, name: str) -> None:
    choice = choose_backend("auto", conditions)
    assert choice.name == name
    (note,) = choice.notes
    assert note.startswith(f"--shared-prompt-backend auto takes {name}")
    for other in list(BACKENDS)[: list(BACKENDS).index(name)]:
        assert f"not {other}: {BACKENDS[other].refusal(conditions)}" in note


def test_a_backend_that_was_asked_for_is_taken() -> None:
    for name, one in BACKENDS.items():
        if one.refusal(CPU) is None:
            assert choose_backend(name, CPU) == Choice(name)
    assert choose_backend("flex", CUDA) == Choice("flex")


def test_a_backend_that_cannot_run_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"merge cannot run here \(it has no sliding window\): write gather, or auto"):
        choose_backend("merge", dataclasses.replace(CPU, window=4))
    with pytest.raises(UsageError, match="on cuda it needs --bf16 or --fp16"):
        choose_backend("merge", Conditions("cuda", torch.float32))
    with pytest.raises(UsageError, match="flash-attn is not installed"):
        choose_backend("flash", CUDA)
    with pytest.raises(UsageError, match="FlexAttention does not train on cpu"):
        choose_backend("flex", CPU)


def test_an_unknown_backend_is_an_error_that_names_the_others() -> None:
    with pytest.raises(UsageError, match="write one of auto, merge, gather, triton, flash, flex, naive"):
        choose_backend("fast", CPU)
