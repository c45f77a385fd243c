"""Run TRL an iteration at a request, in its environment: `python -m benchmarks.gpu.rival_trl PIPES SETTINGS`.

It trains with TRL's own defaults, except those that SETTINGS change (`Settings` as JSON), those that only write files,
and recomputed activations, which cost time. On a GPU vLLM samples in the same process, and Liger's kernels are used if
they are installed; on the CPU transformers samples.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.players import Player


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one run of TRL."""

    model: str
    prompts: str
    reward: str
    """The reward function, as PATH:FUNCTION."""
    folder: str
    """The folder that TRL may write to."""
    num_prompts: int
    """Prompts of an iteration."""
    group_size: int
    prompt_length: int
    """Tokens of a prompt."""
    num_tokens: int
    """Tokens of a response."""
    num_iterations: int
    batch_size: int
    """Responses of a micro-batch."""
    dtype: str
    is_on_gpu: bool
    memory_share: float
    """The share of the GPU's memory that vLLM may take, weights included."""


def make_words(settings: Settings, has_liger: bool) -> dict[str, Any]:
    """Return the arguments of GRPOConfig."""
    words: dict[str, Any] = {
        "output_dir": settings.folder, "report_to": [], "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True, "max_steps": settings.num_iterations, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "num_generations": settings.group_size,
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.num_prompts * settings.group_size // settings.batch_size,
        "gradient_checkpointing": False, "max_completion_length": settings.num_tokens, "shuffle_dataset": False,
        "bf16": settings.dtype == "bfloat16", "model_init_kwargs": {"dtype": settings.dtype},
    }  # fmt: skip
    if not settings.is_on_gpu:
        return words | {"use_cpu": True, "generation_kwargs": {"min_new_tokens": settings.num_tokens}}
    return words | {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": settings.memory_share,
        "vllm_max_model_length": settings.prompt_length + settings.num_tokens, "use_liger_kernel": has_liger,
        "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip


def require_length(reward: Callable[..., Any], num_tokens: int) -> Callable[..., Any]:
    """Return the reward function, which raises unless every response has this many tokens: both sides do equal work."""

    @functools.wraps(reward)
    def checked(*operands: Any, completion_ids: Sequence[Sequence[int]], **columns: Any) -> Any:
        lengths = sorted({len(one) for one in completion_ids})
        if lengths != [num_tokens]:
            raise RuntimeError(f"every response of TRL must have {num_tokens} tokens, and these have {lengths}")
        return reward(*operands, completion_ids=completion_ids, **columns)

    return checked


def main() -> None:
    pipes, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    player = Player(pipes, torch.cuda.synchronize if settings.is_on_gpu else lambda: None)

    class Requests(TrainerCallback):
        """Waits for the request of each step: the one that takes an iteration's prompts, samples and trains."""

        def on_step_begin(self, *_args: object, **_words: object) -> None:
            player.begin()

        def on_step_end(self, *_args: object, **_words: object) -> None:
            player.end()

    path, function = settings.reward.rsplit(":", 1)
    # The models of benchmarks have a tokenizer without these two.
    tokenizer = AutoTokenizer.from_pretrained(settings.model, pad_token="w0", eos_token="w1")
    trainer = GRPOTrainer(
        settings.model,
        reward_funcs=require_length(runpy.run_path(path)[function], settings.num_tokens),
        args=GRPOConfig(**make_words(settings, importlib.util.find_spec("liger_kernel") is not None)),
        train_dataset=Dataset.from_list([json.loads(row) for row in Path(settings.prompts).read_text().splitlines()]),
        processing_class=tokenizer,
        callbacks=[Requests()],
    )
    trainer.train()
    # As Python ends, threads that still run would abort the process, after all was measured.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
