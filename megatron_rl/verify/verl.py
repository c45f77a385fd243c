"""After each weight sync of verl's, compare vLLM's weights with those that its trainer gave away, bit for bit.

    VERL_USE_EXTERNAL_MODULES=megatron_rl.verify.verl python -m verl.trainer.main_ppo ...

verl imports this module in each of its processes that has the variable, and each sync that was compared is logged. To a
Ray cluster that runs already, `ray_kwargs.ray_init.runtime_env.env_vars` must pass it. A difference is an error of the
sync, and ends the run; MEGATRON_RL_VERIFY=warn only warns. Weights pass through a folder in memory once more;
MEGATRON_RL_VERIFY_FOLDER names another one, which all hosts of a server share.

Adapters are compared in their slot, and the weights below them when they are sent. Syncs in the wire format
`delta_flush` are not compared, and say so.
"""

import dataclasses
import functools
import json
import logging
import os
import warnings
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from verl.utils.vllm import resolve_weight_name
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout import utils, vllm_rollout

from megatron_rl.verify.folders import make_shared_folder, read_folder, save
from megatron_rl.verify.trainer import must_be_equal
from megatron_rl.verify.worker import compare_adapter, compare_weights

_LOGGER = logging.getLogger(__name__)


def must_hold(worker: Any, folder: str, is_adapter: bool) -> None:
    """Raise NotSynced, or warn, unless a worker of vLLM's holds the weights of a folder."""
    if is_adapter:
        answer = compare_adapter(worker, folder)
    else:
        # A trainer of adapters has other names for the weights below them.
        model = worker.model_runner.get_model()
        names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        weights = read_folder(Path(folder))
        answer = compare_weights(worker, ((resolve_weight_name(model, name, names), one) for name, one in weights))
    must_be_equal([{"rank": worker.rank, **answer}], os.environ.get("MEGATRON_RL_VERIFY") == "warn")
    _LOGGER.warning("megatron_rl.verify: worker %s was compared with the trainer", worker.rank)


def comparing(update_weights: Any) -> Any:
    """Return the sync with a comparison after it."""

    @functools.wraps(update_weights)
    async def update_and_compare(self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        is_whole = kwargs.get("wire_format", "named_tensors") == "named_tensors"
        # One rank of each server calls its workers.
        if not is_whole or not self._has_server:
            if not is_whole:
                warnings.warn("megatron_rl.verify.verl compares no weights that are sent as differences", stacklevel=2)
            await update_weights(self, weights, *args, **kwargs)
            return
        adapter = kwargs.get("peft_config") if kwargs.get("base_sync_done") else None
        with make_shared_folder(os.environ.get("MEGATRON_RL_VERIFY_FOLDER")) as folder:
            await update_weights(self, _saving(weights, Path(folder)), *args, **kwargs)
            if adapter:
                _write_adapter(Path(folder), adapter)
            await self._execute_method("megatron_rl_must_hold", args=(folder, bool(adapter)))

    return update_and_compare


async def _saving(weights: Any, folder: Path) -> AsyncIterator[Any]:
    number = 0
    async for name, tensor in ensure_async_iterator(weights):
        save(folder, number, name, tensor)
        number += 1
        yield name, tensor


def _write_adapter(folder: Path, config: Any) -> None:
    """Make PEFT's folder of an adapter of the tensors that were saved."""
    tensors = dict(read_folder(folder))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)
    plain: Mapping[str, Any] = {name: [*value] if isinstance(value, set) else value for name, value in values.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, default=str))


vllm_rollout.ServerAdapter.update_weights = comparing(vllm_rollout.ServerAdapter.update_weights)
utils.vLLMColocateWorkerExtension.megatron_rl_must_hold = must_hold
