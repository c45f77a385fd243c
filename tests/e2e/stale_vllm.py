"""A changed vLLM: a plugin with which a run finds faults that its engines do not report.

`write` makes an interpreter whose vLLM loads the plugin; vLLM calls `register` in each of its processes.
"""

import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
_PLANT = "MEGATRON_RL_PLANT"


def write(folder: Path, plant: dict[str, Any]) -> Path:
    """Write a command that runs Python with this plant in its vLLM."""
    packages = folder / "plugin"
    information = packages / "stale_vllm-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stale-vllm\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nstale = stale_vllm:register\n")
    (packages / "stale_vllm.py").symlink_to(FOLDER / "stale_vllm.py")
    command = folder / "python"
    command.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            export {_PLANT}='{json.dumps(plant)}'
            export PYTHONPATH="$PYTHONPATH:{packages}"
            exec {shlex.quote(sys.executable)} "$@"
            """
        )
    )
    command.chmod(0o755)
    return command


def register() -> None:
    plant = json.loads(os.environ[_PLANT])
    plants = {
        "load": _keep_tensors,
        "adapters": _keep_factors,
        "pack": _keep_packed,
        "quantize": _keep_quantized,
        "tied": _keep_tied,
        "sample": _shift_log_probs,
        "versions": _record_no_versions,
        "sleep": _lose_at_sleep,
    }
    plants[plant["where"]](plant)


def _keep_tensors(plant: dict[str, Any]) -> None:
    """Keep, from a version on, the tensors of the load before if their names match."""
    from vllm.model_executor.models import qwen3, qwen3_moe

    for model in (qwen3.Qwen3ForCausalLM, qwen3_moe.Qwen3MoeForCausalLM):
        model.load_weights = _stale(model.load_weights, plant)


def _stale(load_weights: Any, plant: dict[str, Any]) -> Any:
    known: dict[str, Any] = {}
    is_stale = _find_stale(plant)

    def kept(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if not is_stale() or plant["names"] not in name:
                known[name] = tensor.clone()
            yield name, known[name]

    def load(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        return load_weights(self, kept(weights))

    return load


def _keep_factors(plant: dict[str, Any]) -> None:
    """Keep, from a version on, the factors of the adapters before if their names match."""
    from vllm.lora.lora_model import LoRAModel

    build, is_stale, known = LoRAModel.from_lora_tensors, _find_stale(plant), {}

    def build_stale(number: int, tensors: dict[str, Any], *rest: Any, **others: Any) -> Any:
        for name, tensor in tensors.items():
            if not is_stale() or plant["names"] not in name:
                known[name] = tensor.clone()
        return build(number, {name: known[name].clone() for name in tensors}, *rest, **others)

    LoRAModel.from_lora_tensors = build_stale


def _find_stale(plant: dict[str, Any]) -> Callable[[], bool]:
    """Return a check whether the plant's version, or one after it, was published to this worker.

    A worker loads its model before the first publish too, and how often depends on what an earlier start kept on disk.
    """
    from megatron_rl.sidecar.vllm.worker import WorkerExtension

    receive, num_published = WorkerExtension.megatron_rl_load, 0

    def count(self: Any, *args: str) -> Any:
        nonlocal num_published
        num_published += 1
        return receive(self, *args)

    WorkerExtension.megatron_rl_load = count
    return lambda: num_published > plant["from_version"]


def _keep_packed(plant: dict[str, Any]) -> None:
    """Keep, from a version on, what one layer packed before, so that it computes with that whatever it is given."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    is_stale = _find_stale(plant)

    def keeps(layer: Any, remove_weight: bool) -> None:
        before = getattr(layer, "cpu_linear", None)
        dispatch(layer, remove_weight)
        if before is not None and is_stale() and plant["names"] in getattr(layer, "prefix", ""):
            layer.cpu_linear = before

    utils.dispatch_cpu_unquantized_gemm = keeps


def _keep_quantized(plant: dict[str, Any]) -> None:
    """Keep, from a version on, what one layer quantized before, so that it computes with that whatever it is given."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod as Method
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    process, is_stale = Method.process_weights_after_loading, _find_stale(plant)

    def keeps(self: Any, layer: Any) -> None:
        process(self, layer)
        if is_stale() and plant["names"] in layer.prefix:
            before = get_layerwise_info(layer).kernel_tensors[0]
            layer.weight.data = before["weight"].data.clone()

    Method.process_weights_after_loading = keeps


def _keep_tied(plant: dict[str, Any]) -> None:
    """Keep, from a version on, what layers that share another's parameter packed before, as vLLM itself would."""
    from megatron_rl.sidecar.vllm import held_model

    pack, is_stale = held_model.pack_tied_layers, _find_stale(plant)
    held_model.pack_tied_layers = lambda model: [] if is_stale() else pack(model)


def _shift_log_probs(plant: dict[str, Any]) -> None:
    """Change the log-probs of sampled tokens, and nothing else."""
    from vllm.v1.sample.sampler import Sampler

    forward = Sampler.forward

    def shifted(self: Any, *args: Any, **keywords: Any) -> Any:
        output = forward(self, *args, **keywords)
        if (tensors := output.logprobs_tensors) is not None:
            output.logprobs_tensors = tensors._replace(logprobs=tensors.logprobs - plant["by"])
        return output

    Sampler.forward = shifted


def _record_no_versions(plant: dict[str, Any]) -> None:
    """Act as a vLLM before 0.32, which knows no versions."""
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    CompletionOutput.__annotations__.pop("weight_versions", None)
    CompletionOutput.weight_versions = property(lambda self: None, lambda self, value: None)
    for kind in (AsyncLLM, EngineClient):
        for name in ("update_weight_version", "get_weight_version"):
            if name in vars(kind):
                delattr(kind, name)


def _lose_at_sleep(plant: dict[str, Any]) -> None:
    """Lose tensors after the load that follows the second sleep; or trust the base that was held before it."""
    from megatron_rl.sidecar.vllm import held_model, sleeping

    end, num_ends = sleeping.Sleep.end, 0

    def lose(self: Any, part: str) -> None:
        nonlocal num_ends
        end(self, part)
        num_ends += 1
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if num_ends >= 4 and plant["lost"] in name:
                tensor.data.zero_()

    sleeping.Sleep.end = lose
    if plant["lost"] == "base":
        held_model.HeldModel.forget_base = lambda self: None
