"""After each weight sync of verl's, compare vLLM's weights with those that its trainer gave away, bit for bit.

    VERL_USE_EXTERNAL_MODULES=megatron_rl.verify.verl python -m verl.trainer.main_ppo ...

verl imports this module in each of its processes, trainers and vLLM's workers alike. A difference is an error of the
sync, and ends the run; MEGATRON_RL_VERIFY=warn only warns. Weights pass through a folder in memory, once more than
without; MEGATRON_RL_VERIFY_FOLDER names another folder of the host. Adapters are compared in their slot.

Not known here: the wire format `delta_flush`, whose syncs are not compared, and say so.
"""

import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.workers.rollout.vllm_rollout import utils, vllm_rollout

from megatron_rl.verify.trainer import make_shared_folder, must_be_equal, saving
from megatron_rl.verify.worker import compare_adapter, compare_weights, read_folder


def must_hold(worker: Any, folder: str, is_adapter: bool) -> None:
    """Raise NotSynced, or warn, unless a worker of vLLM's holds the weights of a folder."""
    answer = compare_adapter(worker, folder) if is_adapter else compare_weights(worker, read_folder(folder))
    must_be_equal([{"rank": worker.rank, **answer}], os.environ.get("MEGATRON_RL_VERIFY") == "warn")


def comparing(update_weights: Any) -> Any:
    """Return the sync with a comparison after it."""

    @functools.wraps(update_weights)
    async def update_and_compare(self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("wire_format", "named_tensors") != "named_tensors":
            warnings.warn("megatron_rl.verify.verl does not compare weights that are sent as differences", stacklevel=2)
            await update_weights(self, weights, *args, **kwargs)
            return
        adapter = kwargs.get("peft_config") if kwargs.get("base_sync_done") else None
        with make_shared_folder(os.environ.get("MEGATRON_RL_VERIFY_FOLDER")) as folder:
            await update_weights(self, saving(weights, folder), *args, **kwargs)
            if adapter:
                _write_adapter(Path(folder), adapter)
            await self._execute_method("megatron_rl_must_hold", args=(folder, bool(adapter)))

    return update_and_compare


def _write_adapter(folder: Path, config: Any) -> None:
    """Make PEFT's folder of an adapter of the tensors that were saved."""
    from safetensors.torch import save_file

    tensors = dict(read_folder(str(folder)))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)
    plain: Mapping[str, Any] = {name: [*value] if isinstance(value, set) else value for name, value in values.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, default=str))


vllm_rollout.ServerAdapter.update_weights = comparing(vllm_rollout.ServerAdapter.update_weights)
utils.vLLMColocateWorkerExtension.megatron_rl_must_hold = must_hold
