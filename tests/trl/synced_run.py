"""A run of TRL's on a real vLLM, whose weight syncs are watched: `python -m tests.trl.synced_run FOLDER PLANT STEPS`.

vLLM packs linear layers on a CPU, which TRL's sync does not know; here it leaves them as they are, as on a GPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import peft
import trl
import vllm._custom_ops

from megatron_rl.verify.trainer import NotSynced
from megatron_rl.verify.trl import watch
from tests.e2e import loop

ADAPTERS = ("adapters", "adapters not sent")


def plant_fault(name: str, generation: Any) -> None:
    """Break the sync as others have seen it broken."""
    model = generation.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    load = model.load_weights
    if name == "stale layer":
        # TRL loads tensor by tensor.
        model.load_weights = lambda weights: (
            load(weights) if not isinstance(weights, list) or "layers.1." not in weights[0][0] else None
        )
    if name == "adapters not sent":
        generation.model.merge_adapter = generation.model.unmerge_adapter = lambda: None
    if name.startswith("sleep"):
        put_to_sleep(name, generation, model)


def put_to_sleep(name: str, generation: Any, model: Any) -> None:
    """Stand in for vLLM's sleep of level 2: weights are lost, and buffers come back."""
    kept: dict[str, Any] = {}

    def sleep(level: int = 2) -> None:
        for place, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kept[place] = tensor.detach().clone()
            tensor.data.zero_()

    def wake_up(tags: list[str]) -> None:
        if "weights" in tags and name != "sleep drops a buffer":
            for place, tensor in model.named_buffers():
                tensor.data.copy_(kept[place])
        if "kv_cache" in tags and name == "sleep drops a weight":
            model.model.norm.weight.data.zero_()

    generation.enable_sleep_mode = True
    generation.llm.sleep, generation.llm.wake_up = sleep, wake_up
    sleep()


def main() -> None:
    folder, plant, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    vllm._custom_ops._supports_onednn = False
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64,
        max_completion_length=8,
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=steps,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        str(loop.draw_model(folder / "model", head_dim=32)),
        lambda completion_ids, **columns: [float(sum(tokens) % 7) for tokens in completion_ids],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{number} 3 5 8"} for number in range(2, 100)]),
        peft_config=peft.LoraConfig(r=8, target_modules="all-linear") if plant in ADAPTERS else None,
    )
    plant_fault(plant, trainer.vllm_generation)
    watched, said, begin = watch(trainer), "", time.perf_counter()
    try:
        trainer.train()
    except NotSynced as error:
        said = str(error)
    seconds = time.perf_counter() - begin
    print(json.dumps({"syncs": watched.num_syncs, "said": said, "part": watched.seconds / seconds}), flush=True)


if __name__ == "__main__":
    main()
