"""Run TRL's GRPOTrainer on the data of `trl`, in TRL's environment: `python -m benchmarks.trl_trainer SETTINGS OUT`.

It trains with TRL's own defaults, except those that SETTINGS change (`Settings` as JSON), those that only write files,
and recomputed activations: they cost time and spare memory that is not short. The seconds between the ends of steps go
to OUT. transformers samples, by its plain `generate`. Its continuous batching was tried and takes ten times as long on
a CPU. TRL could not load weights into a vLLM 0.32 there, which is newer than those that TRL 1.16 supports.
"""

import dataclasses
import itertools
import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one run of TRL."""

    model: str
    prompts: str
    reward: str
    """The reward function, as PATH:FUNCTION."""
    num_prompts: int
    """Prompts of a step."""
    group_size: int
    num_tokens: int
    """Tokens of a response."""
    num_steps: int
    batch_size: int
    """Responses of a micro-batch, at most."""


def main() -> None:
    settings, out = Settings(**json.loads(sys.argv[1])), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_args: object, **_words: object) -> None:
            ends.append(time.monotonic())

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    per_process = settings.num_prompts * settings.group_size // int(os.environ["WORLD_SIZE"])
    batch_size = min(settings.batch_size, per_process)
    arguments = GRPOConfig(
        output_dir=str(out.parent), use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=settings.num_steps, learning_rate=1e-6,
        lr_scheduler_type="constant", num_generations=settings.group_size, per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=per_process // batch_size, gradient_checkpointing=False,
        max_completion_length=settings.num_tokens, generation_kwargs={"min_new_tokens": settings.num_tokens},
    )  # fmt: skip
    path, function = settings.reward.rsplit(":", 1)
    trainer = GRPOTrainer(
        settings.model,
        reward_funcs=runpy.run_path(path)[function],
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(row) for row in Path(settings.prompts).read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        out.write_text(json.dumps([end - begun for begun, end in itertools.pairwise(ends)]))
    # As Python ends, threads of gloo that still run would abort the process: rarely, and after all was measured.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
