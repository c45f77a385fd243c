"""Run Megatron-LM's own GRPO, from rollouts to gradients: its functions of a source tree, on one rank.

Each function is taken out of its file alone, for importing the files needs all that Megatron-RL needs. The code here is
what lies between their calls in `prepare_data_for_update`, in `forward_step` of `train_rl.py`, and in
`finalize_model_grads`.

Letters: B rows, L tokens of a row, V vocabulary, E hidden size.
"""

import __future__

import ast
import collections
import copy
import dataclasses
import inspect
import logging
import types
import typing
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.grpo_twin import Group
from tests.truth import everything_in

Tensors = dict[str, torch.Tensor]

PAD, EOD = 0, 1
# The functions by their files; a file that moved stands twice.
_PLACES = {
    "megatron/rl/rl_utils.py": (
        "calculate_grpo_advantages", "prepare_trajectories", "update_inference_logprobs_group_stats",
        "align_unpacked_inference_logprobs", "selective_log_softmax", "calculate_grpo_loss", "_pad_nonnull_with_zeros",
    ),
    "megatron/rl/sequence_packing_utils.py": (
        "PackingInfo", "get_actual_sequence_lengths", "SequencePacker", "pack_inference_logprobs",
        "load_packed_data_by_index",
    ),
    "megatron/training/utils.py": ("get_ltor_masks_and_position_ids",),
    "megatron/training/utils/common_utils.py": ("get_ltor_masks_and_position_ids",),
    "megatron/core/pipeline_parallel/schedules.py": ("forward_step_calc_loss",),
    "train_rl.py": ("loss_func",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rules:
    """The settings that Megatron-RL's flags give."""

    lower: float = 0.2
    upper: float = 0.2
    beta: float = 0.0
    entropy_weight: float = 0.0
    is_corrected: bool = False
    """--rl-inference-logprobs-is-correction"""
    truncation: float | None = None
    is_packed: bool = False
    """--rl-use-sequence-packing"""
    is_per_token: bool = False
    """--calculate-per-token-loss"""
    micro_batch_size: int = 1


@dataclasses.dataclass(frozen=True)
class Update:
    """The loss and gradients of an update."""

    loss: float
    gradients: Tensors
    terms_N: torch.Tensor
    """The losses of all tokens of responses."""


class TokenRollout(types.SimpleNamespace):
    """A response with its prompt, as an agent gives it."""


class _Tokenizer:
    library = "none"
    pad, eod, bos = PAD, EOD, None
    vocab_size = 0

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(tokens)


class _Another:
    """A tokenizer other than the given one."""


class Upstream:
    """The functions of one tree."""

    def __init__(self, tree: Path):
        found: dict[str, Any] = {}
        for path, names in _PLACES.items():
            if (tree / path).exists():
                found |= _take(tree / path, names)
        missing = {name for names in _PLACES.values() for name in names} - found.keys()
        assert not missing, f"{tree} has no {', '.join(sorted(missing))}"
        self.functions = types.SimpleNamespace(**found)

    def advantages(self, rewards: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the advantages of all responses of groups of one size, each of one turn."""
        num_turns = [[1] * len(of_group) for of_group in rewards]
        return np.array(self.functions.calculate_grpo_advantages([list(one) for one in rewards], num_turns))

    def update(
        self, groups: Sequence[Group], models: dict[str, Tensors], rules: Rules, row_length: int, dtype: torch.dtype
    ) -> Update:
        """Return the gradients of one update of all groups; the policy's next token depends on the last one alone."""
        with everything_in(dtype), mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor):
            policy = {name: value.to(dtype, copy=True).requires_grad_() for name, value in models["policy"].items()}
            frozen = [{name: value.to(dtype) for name, value in models[role].items()} for role in ("old", "reference")]
            gather = self._bins if rules.is_packed else self._rows
            micro_batches = list(gather(groups, frozen, rules, row_length, dtype))
            done = [self._backward(policy, each, rules, len(micro_batches)) for each in micro_batches]
            losses, counts, terms = zip(*done, strict=True)
            # With --calculate-per-token-loss finalize_model_grads divides by all tokens, else nothing is left to do.
            divisor = sum(counts) if rules.is_per_token else 1
            gradients = {name: value.grad / divisor for name, value in policy.items()}
            return Update(sum(losses) / divisor, gradients, torch.cat(terms))

    def _rows(
        self, groups: Sequence[Group], frozen: list[Tensors], rules: Rules, row_length: int, dtype: torch.dtype
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each response: `micro_batch_size` of them make a micro-batch."""
        tokens_BL, is_response_BL, engine = self._trajectories(groups, row_length, False)
        _, mask_BL, _ = self.functions.get_ltor_masks_and_position_ids(
            tokens_BL, EOD, PAD, False, False, eod_mask_loss=False, pad_mask_loss=True
        )
        mask_BL[~is_response_BL] = 0.0
        old, reference = (self._log_probs(model, tokens_BL) for model in frozen)
        advantages_B = torch.tensor(self.advantages([group.rewards for group in groups]), dtype=dtype)
        engine_BL = self.functions.align_unpacked_inference_logprobs(
            engine, old, is_response_BL, types.SimpleNamespace()
        )
        for first in range(0, len(tokens_BL), rules.micro_batch_size):
            rows = slice(first, first + rules.micro_batch_size)
            yield {
                "tokens": tokens_BL[rows], "mask": mask_BL[rows, 1:].contiguous(), "old": old[rows],
                "reference": reference[rows], "advantages": advantages_B[rows], "seq_starts": None,
                "seq_lengths": None, "engine": engine_BL[rows] if rules.is_corrected else None,
            }  # fmt: skip

    def _bins(
        self, groups: Sequence[Group], frozen: list[Tensors], rules: Rules, row_length: int, dtype: torch.dtype
    ) -> Iterator[dict[str, Any]]:
        """Yield bins of several responses, each a micro-batch."""
        functions = self.functions
        tokens_BL, is_response_BL, engine_BL = self._trajectories(groups, row_length, True)
        packed, positions, *_, mask, info = functions.SequencePacker(row_length, PAD).pack_sequences(
            tokens_BL, is_response_BL
        )
        engine = functions.pack_inference_logprobs(engine_BL, info, is_response_BL, row_length)
        advantages_B = torch.tensor(self.advantages([group.rewards for group in groups]), dtype=dtype)
        old, reference = (self._log_probs(model, packed) for model in frozen)
        context = types.SimpleNamespace(
            packed_trajs=packed, packed_position_ids=positions, packed_loss_mask=mask, packing_info=info,
            bin_advantages=[advantages_B[numbers] for numbers in info.bin_seq_indices], old_logprobs=old,
            ref_logprobs=reference, cached_packed_seq_params=[None] * len(packed),
            packed_inference_logprobs=engine[0] if isinstance(engine, tuple) else engine,
        )  # fmt: skip
        names = ("tokens", "advantages", "old", "mask", "positions", "reference", "engine", "seq_starts", "seq_lengths")
        for number in range(len(packed)):
            found = functions.load_packed_data_by_index(number, context, rules.is_corrected)
            yield dict(zip(names, found, strict=False))

    def _trajectories(self, groups: Sequence[Group], row_length: int, is_packed: bool) -> tuple[torch.Tensor, ...]:
        rollouts = [
            TokenRollout(
                trajectory=[group.prompt + response],
                generation_mask=[[False] * len(group.prompt) + [True] * len(response)],
                logprobs=[engine],
                env_id="",
            )
            for group in groups
            for response, engine in zip(group.responses, group.engine, strict=True)
        ]
        prepare = self.functions.prepare_trajectories
        if "rollout_turns" in inspect.signature(prepare).parameters:
            tokens, masks, engine = prepare([(rollout, 0) for rollout in rollouts], _Tokenizer(), row_length, False)
        else:
            tokens, masks, engine = prepare(rollouts, _Tokenizer(), row_length, is_packed, False)
        if is_packed and isinstance(engine, list):
            engine = self.functions._pad_nonnull_with_zeros(engine, row_length)
        return tokens, masks, engine

    def _log_probs(self, model: Tensors, tokens_BL: torch.Tensor) -> torch.Tensor:
        logits_BLV = torch.nn.functional.embedding(tokens_BL, model["embedding_VE"]) @ model["weight_VE"].T
        return self.functions.selective_log_softmax(logits_BLV[:, :-1, :], tokens_BL[:, 1:])

    def _backward(
        self, policy: Tensors, batch: dict[str, Any], rules: Rules, num_micro_batches: int
    ) -> tuple[float, int, torch.Tensor]:
        """Return the loss as the schedule has it, the number of its tokens, and their losses."""
        losses, *measured = self.functions.calculate_grpo_loss(
            self._log_probs(policy, batch["tokens"]), batch["old"], batch["reference"], batch["advantages"],
            rules.lower, rules.upper, rules.beta, rules.entropy_weight, batch["engine"], rules.truncation,
            batch["seq_starts"], batch["seq_lengths"],
        )  # fmt: skip
        config = types.SimpleNamespace(calculate_per_token_loss=rules.is_per_token, timers=None)
        loss, num_tokens = self.functions.forward_step_calc_loss(
            None, losses, partial(self.functions.loss_func, batch["mask"], *measured), config, None, False,
            num_micro_batches, [], cp_group_size=1, is_last_stage=True,
        )  # fmt: skip
        loss.backward()
        return loss.item(), int(num_tokens), losses.detach()[batch["mask"].bool()]


def _take(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Take these functions and classes out of a file, with stand-ins for every name that they look up elsewhere."""
    args = types.SimpleNamespace(
        context_parallel_size=1, check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False
    )
    namespace: dict[str, Any] = {
        "__name__": __name__, "torch": torch, "np": np, "dist": torch.distributed, "copy": copy, "typing": typing,
        "Counter": collections.Counter, "dataclass": dataclasses.dataclass, "field": dataclasses.field,
        "logging": logging, "logger": logging.getLogger(__name__), "log_single_rank": lambda *_: None,
        "get_args": lambda: args, "get_rerun_state_machine": lambda: None, "TokenRollout": TokenRollout,
        "is_batch_invariant_mode_enabled": lambda: False,
        "_HuggingFaceTokenizer": _Another, "CustomTikTokenizer": _Another,
        "_get_experimental_attention_variant_loss_scale_func": lambda _: None,
    }  # fmt: skip
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    # Annotations name types that are missing here.
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags), namespace)
    return {name: namespace[name] for name in names if name in namespace}
