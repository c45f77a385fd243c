"""Mistakes in which --batch-invariant is asked of engines. What a model lacks, its engine refuses (`invariant.py`)."""

from collections.abc import Iterator

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.sidecar.vllm import flags as vllm_flags

FLAG = "--batch-invariant"
_EXCLUDED = (("--worker-cls",), vllm_flags.FLAGS_OF_DRAFTS, ("--enable-lora",), vllm_flags.FLAGS_OF_STAGES)


def find_invariance_problems(rollout: RolloutConfig, device: str) -> Iterator[str]:
    """Yield each setting with which engines could not compute each token's log-prob to the same bits."""
    if not rollout.is_batch_invariant:
        return
    if rollout.engine != "vllm":
        yield f"{FLAG} is for --rollout-engine vllm, not {rollout.engine}: drop one"
    elif device == "npu":
        yield f"{FLAG} is for engines on a CPU or on CUDA: drop it"
    for flag, is_given in (
        ("--rollout-tensor-parallel-size above 1", rollout.tensor_parallel_size > 1),
        ("--rollout-speculative", rollout.speculative is not None),
        ("--rollout-lora-rank", rollout.lora_rank > 0),
        *(
            (f"{vllm_flags.FLAG} with {flag}", True)
            for flags in _EXCLUDED
            if (flag := vllm_flags.find_flag(rollout.vllm_args, *flags))
        ),
    ):
        if is_given and device == "cpu":
            yield f"{FLAG} and {flag} cannot be given together, because sums would have other orders: drop one of them"
