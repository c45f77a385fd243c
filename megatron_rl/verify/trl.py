"""After each weight sync of TRL's trainer, compare vLLM's weights with the trainer's, bit for bit.

    from megatron_rl.verify.trl import watch

    trainer = GRPOTrainer(...)
    watch(trainer)

Also adapters that vLLM should hold merged. An engine in the trainer's process is looked at again before it samples:
what sleep or a later load changed since then is found. A server, which was started with `--worker-extension-cls
megatron_rl.verify.worker.Verifier` on the trainer's host, is compared through a folder in memory.

Not known here: adapters whose parameters are divided by FSDP or ZeRO-3, which `watch` refuses.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import UsageError
from megatron_rl.ops.slices.naive import digest
from megatron_rl.verify.command import ask
from megatron_rl.verify.folders import make_shared_folder, save
from megatron_rl.verify.trainer import must_be_equal, report
from megatron_rl.verify.worker import compare_weights


def watch(trainer: Any, warns: bool = False, folder: str | None = None) -> "SyncWatch":
    """Have the trainer raise NotSynced at the first difference, or only warn.

    `folder` is where a server of its host can read the weights.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise UsageError("the trainer has no vLLM: set use_vllm=True in its arguments")
    if hasattr(generation.model, "merge_adapter") and (generation._dist.is_fsdp or generation._dist.is_zero3):
        raise UsageError("adapters whose parameters are divided cannot be compared: leave out FSDP or ZeRO-3")
    return SyncWatch(generation, warns, folder)


class SyncWatch:
    """The comparisons of a trainer's engines."""

    def __init__(self, generation: Any, warns: bool, folder: str | None) -> None:
        self.num_syncs = 0
        """Weight syncs that were compared."""
        self.seconds = 0.0
        """The time of all comparisons."""
        self._generation, self._warns, self._folder = generation, warns, folder
        self._digests: dict[str, list[int]] = {}
        self._is_read = False
        self._is_here = generation.mode == "colocate"
        generation.sync_weights = self._then_comparing(generation.sync_weights)
        if self._is_here:
            for name in ("generate", "chat"):
                setattr(generation.llm, name, self._after_looking(getattr(generation.llm, name)))

    def _then_comparing(self, sync: Any) -> Any:
        @functools.wraps(sync)
        def sync_and_compare(*args: Any, **kwargs: Any) -> None:
            self._is_read = False
            with contextlib.nullcontext() if self._is_here else make_shared_folder(self._folder) as folder:
                with self._reading_merged(folder):
                    sync(*args, **kwargs)
                if not self._is_read:
                    self._read(folder)
                if folder is not None and self._generation.accelerator.is_main_process:
                    begin = time.perf_counter()
                    answers = ask(self._generation.vllm_client.base_url, folder)
                    self.seconds += time.perf_counter() - begin
                    must_be_equal(answers, self._warns)
            self.num_syncs += 1

        return sync_and_compare

    @contextlib.contextmanager
    def _reading_merged(self, folder: str | None) -> Iterator[None]:
        """Read the weights before the trainer takes adapters out of them again, which rounds them."""
        model = self._generation.model
        unmerge = getattr(model, "unmerge_adapter", None)
        if unmerge is None:
            yield
            return
        before = vars(model).get("unmerge_adapter")

        def read_and_unmerge() -> None:
            try:
                self._read(folder)
            finally:
                unmerge()

        model.unmerge_adapter = read_and_unmerge
        try:
            yield
        finally:
            del model.unmerge_adapter
            if before is not None:
                model.unmerge_adapter = before

    def _read(self, folder: str | None) -> None:
        """Compare the trainer's weights; or save them, since a server that receives weights answers nothing else."""
        self._is_read = True
        begin, generation = time.perf_counter(), self._generation
        is_tuned = hasattr(generation.model, "merge_adapter")
        weights = list_merged(generation.model) if is_tuned else generation._iter_named_params()
        if folder is None:
            answers = [{"rank": generation.accelerator.process_index, **compare_weights(self._worker, weights)}]
            self._digests = self._digest()
            self.seconds += time.perf_counter() - begin
            must_be_equal(answers, self._warns)
            return
        # Every process takes part in gathering a weight.
        for number, (name, tensor) in enumerate(weights):
            if generation.accelerator.is_main_process:
                save(Path(folder), number, name, tensor)
        self.seconds += time.perf_counter() - begin

    @property
    def _worker(self) -> Any:
        return self._generation.llm.llm_engine.model_executor.driver_worker.worker

    def _digest(self) -> dict[str, list[int]]:
        model = self._worker.model_runner.get_model()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {
            name: digest(torch.atleast_2d(tensor.detach().flatten(1) if tensor.dim() > 2 else tensor.detach())).tolist()
            for name, tensor in tensors
            if tensor.numel()
        }

    def _after_looking(self, sample: Any) -> Any:
        @functools.wraps(sample)
        def look_and_sample(*args: Any, **kwargs: Any) -> Any:
            begin, held = time.perf_counter(), self._digest() if self._digests else {}
            self.seconds += time.perf_counter() - begin
            if changed := [name for name, one in self._digests.items() if held.get(name) != one]:
                self._digests = held
                report(
                    f"vLLM's weights changed after their sync, by sleep or a load: {', '.join(changed)}", self._warns
                )
            return sample(*args, **kwargs)

        return look_and_sample


def list_merged(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model of PEFT's with its adapters in them, under the names of the model alone."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, parameter in model.named_parameters():
        if model.prefix in name or "original_module" in name:
            continue
        tensor, layer = parameter.data, layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            for adapter in set(layer.active_adapters) - set(layer.merged_adapters):
                tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        yield name.replace("modules_to_save.default.", ""), tensor
