"""The task of --stage dpo: pairs of responses to a prompt, in one pass of policy and reference over shared prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.algorithm.declaration import OLD, POLICY
from megatron_rl.algorithm.library.dpo import PreferenceConfig
from megatron_rl.algorithm.objective import PreferenceObjective, combine_statistics, copy_to_host
from megatron_rl.trainer.data.batch import Batch
from megatron_rl.trainer.data.demonstrations import Pair
from megatron_rl.trainer.data.packing import pack_groups
from megatron_rl.trainer.loop.supervised import Packer, Packs
from megatron_rl.trainer.mcore.step.forward_step import (
    Model,
    PolicyStep,
    Report,
    RoleAssignment,
    is_reporter,
    run_forward_only,
)
from megatron_rl.trainer.mcore.step.policy import FrozenModel, Policy

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.step.trace import StepTrace


@dataclasses.dataclass(frozen=True)
class Comparison:
    objective: PreferenceObjective
    policy: Model
    others: Mapping[str, Model]
    """The reference, if the loss has one."""
    name = "pairs"

    @classmethod
    def build(
        cls, config: PreferenceConfig, longest: int, policy: Policy, others: Mapping[str, FrozenModel]
    ) -> "Comparison":
        objective = PreferenceObjective(config, longest)
        return cls(objective, policy.wrapped, {name: other.chunks for name, other in others.items()})

    def pack(self, rows: Sequence[Pair], index: int, packer: Packer) -> Batch:
        """Lay out pairs as groups of two, whose prompt is shared."""
        groups = [(pair.prompt, pair.responses) for pair in rows]
        pack = packer.finish(pack_groups(groups, packer.multiple_of, vocab_size=packer.vocab_size))
        lengths_S = torch.tensor([len(one) for pair in rows for one in pair.responses], dtype=torch.int64)
        # A batch of sampled responses also has what engines and rewards said of them.
        zeros_N = torch.zeros(pack.num_targets)
        return Batch(0, index, pack, zeros_N, torch.zeros(len(lengths_S)), lengths_S, ())

    def make_step(self, scale: float, trace: "StepTrace | None") -> PolicyStep:
        results = {OLD: POLICY, **{name: name for name in self.others}}
        return PolicyStep(self.policy, RoleAssignment(results, self.others), self.objective, 1.0, scale, trace)

    def read(self, reports: Sequence[Report]) -> list[Mapping[str, float]]:
        on_host = copy_to_host([report["statistics"] for report in reports])
        return [combine_statistics([one])[0] for one in on_host]

    def count_share(self, packs: Packs) -> int:
        return packs.num_rows

    def measure_held_out(self, packs: Packs, policy: Policy) -> Mapping[str, float]:
        reports = run_forward_only(self.make_step(1.0, None), self.policy, packs)
        if not is_reporter():
            return {}
        sums, _ = combine_statistics(copy_to_host([report["statistics"] for report in reports]))
        return {**sums, self.name: packs.num_rows}

    def describe(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return means over pairs: of losses, of the share that the loss tells apart, of rewards and log-probs."""
        means = {name: sums[name] / sums["pairs"] for name in ("accuracy", "chosen", "rejected")}
        log_probs = {name: sums[f"log_prob.{name}"] / sums["pairs"] for name in ("chosen", "rejected")}
        return {"preference": {**means, "margin": means["chosen"] - means["rejected"], "log_probs": log_probs}}

    def describe_held_out(self, sums: Mapping[str, float]) -> dict[str, Any]:
        described = self.describe(sums)["preference"]
        return {"loss": sums["loss"] / sums["pairs"], "num_pairs": int(sums["pairs"]), **described}
