"""Extract from a vLLM, without importing it, the form of everything that this package imports, subclasses and calls.

    python -m tools.vllm_facts WHEEL|FOLDER > tests/golden/vllm/VERSION.json

WHEEL comes from `pip download --no-deps vllm==VERSION`; FOLDER is one that holds the package `vllm`, such as an
environment's site-packages. `tests/unit/test_vllm_contract.py` holds our calls against the facts of each version.
"""

import argparse
import ast
import functools
import json
import re
import sys
import zipfile
from pathlib import Path

# Classes with the members that are used; functions, and classes that are only called, have none.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "vllm.distributed.parallel_state.get_tp_group": (),
    "vllm.distributed.weight_transfer.base.ParamMeta": (),
    "vllm.distributed.weight_transfer.base.WeightSource": ("metadata", "__iter__", "iter_full"),
    "vllm.distributed.weight_transfer.base.VLLMWeightSyncClient": (
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    ),
    "vllm.distributed.weight_transfer.nccl_engine.NCCLTrainerInitInfo": (),
    "vllm.distributed.weight_transfer.nccl_engine.NCCLTrainerWeightTransferEngine": (
        "trainer_init", "send_weights", "shutdown",
    ),
    "vllm.distributed.weight_transfer.nccl_engine.NCCLWeightTransferInitInfo": (),
    "vllm.distributed.weight_transfer.nccl_engine.NCCLWeightTransferUpdateInfo": (),
    "vllm.entrypoints.cli.serve.run_headless": (),
    "vllm.entrypoints.common.cli_args.make_arg_parser": (),
    "vllm.entrypoints.launchers.cli_args.make_arg_parser": (),
    "vllm.entrypoints.openai.cli_args.make_arg_parser": (),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": (),
    "vllm.parser.ParserManager": ("get_parser",),
    "vllm.reasoning.ReasoningParserManager": ("list_registered",),
    "vllm.tokenizers.registry.get_tokenizer": (),
    "vllm.tool_parsers.ToolParserManager": ("list_registered",),
    "vllm.logprobs.FlatLogprobs": ("token_ids", "logprobs"),
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA": (
        "create_lora_weights", "reset_lora", "set_lora",
    ),
    "vllm.lora.layers.column_parallel_linear.ColumnParallelLinearWithLoRA": (),
    "vllm.lora.layers.column_parallel_linear.MergedColumnParallelLinearWithLoRA": (),
    "vllm.lora.layers.column_parallel_linear.MergedQKVParallelLinearWithLoRA": (),
    "vllm.lora.layers.column_parallel_linear.QKVParallelLinearWithLoRA": (),
    "vllm.lora.layers.replicated_linear.ReplicatedLinearWithLoRA": (),
    "vllm.lora.layers.row_parallel_linear.RowParallelLinearWithLoRA": (),
    "vllm.lora.lora_model.LoRAModel": ("from_lora_tensors",),
    "vllm.lora.model_manager.LoRAModelManager": (
        "_create_merged_loras_inplace", "_get_lora_layer_weights", "activate_adapter", "add_adapter", "lora_config",
        "lora_index_to_id", "model", "modules", "packed_modules", "remove_all_adapters",
    ),
    "vllm.lora.peft_helper.PEFTHelper": (),
    "vllm.lora.request.LoRARequest": (),
    "vllm.lora.utils.parse_fine_tuned_lora_name": (),
    "vllm.lora.worker_manager.WorkerLoRAManager": ("_load_adapter",),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": (
        "process_weights_after_loading",
    ),
    "vllm.model_executor.model_loader.reload.layerwise._copy_and_restore_kernel_tensors": (),
    "vllm.model_executor.model_loader.reload.meta.materialize_layer": (),
    "vllm.model_executor.model_loader.reload.layerwise._finalize_attention_layer": (),
    "vllm.model_executor.model_loader.reload.layerwise._layerwise_process": (),
    "vllm.model_executor.model_loader.reload.layerwise._place_kernel_tensors": (),
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info": (),
    "vllm.model_executor.model_loader.reload.inplace.reload_weights": (),
    "vllm.model_executor.model_loader.reload.meta.restore_layer_on_meta": (),
    "vllm.model_executor.model_loader.weight_utils.default_weight_loader": (),
    "vllm.model_executor.custom_op.CustomOp": ("_forward_method",),
    "vllm.model_executor.layers.linear.UnquantizedLinearMethod": ("process_weights_after_loading",),
    "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbeddingBase": ("_compute_inv_freq",),
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": (
        "process_weights_after_loading",
    ),
    "vllm.outputs.CompletionOutput": (
        "index", "token_ids", "logprobs", "finish_reason", "routed_experts", "weight_versions",
    ),
    "vllm.outputs.RequestOutput": ("lora_request", "outputs", "prompt_logprobs"),
    "vllm.outputs.WeightVersionSpan": ("version", "start", "end"),
    "vllm.platforms.interface.Platform": ("is_cpu", "device_type", "fp8_dtype"),
    "vllm.renderers.base.BaseRenderer": ("render_cmpl_async",),
    "vllm.sampling_params.RequestOutputKind": ("FINAL_ONLY",),
    "vllm.sampling_params.SamplingParams": (),
    "vllm.utils.argparse_utils.FlexibleArgumentParser": (),
    "vllm.utils.FlexibleArgumentParser": (),
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens": (),
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": (),
    "vllm.v1.core.sched.interface.PauseState": ("PAUSED_ALL",),
    "vllm.v1.core.sched.interface.SchedulerInterface": ("has_unfinished_requests",),
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "finish_requests", "has_requests", "make_stats", "pause_state", "requests", "update_from_output",
    ),
    "vllm.v1.engine.EngineCoreOutput": (),
    "vllm.v1.engine.EngineCoreOutputs": ("outputs", "scheduler_stats", "finished_requests"),
    "vllm.v1.engine.FinishReason": ("ABORT",),
    "vllm.v1.engine.async_llm.AsyncLLM": (
        "abort", "collective_rpc", "engine_core", "generate", "get_weight_version", "output_processor",
        "reset_prefix_cache", "resume_generation", "update_weight_version", "vllm_config",
    ),
    "vllm.v1.engine.core_client.AsyncMPClient": (
        "abort_requests_async", "pause_generation_async", "pause_scheduler_async",
    ),
    "vllm.v1.engine.output_processor.OutputProcessor": ("external_req_ids",),
    "vllm.v1.outputs.LogprobsLists": (),
    "vllm.v1.outputs.LogprobsTensors": (),
    "vllm.v1.request.RequestStatus": ("FINISHED_ABORTED",),
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": (),
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": ("do_kv_cache_update", "forward"),
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler": ("forward_cpu",),
    "vllm.v1.sample.sampler.Sampler": ("compute_logprobs",),
    "vllm.v1.worker.cpu_worker.CPUWorker": ("load_model",),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": ("get_model", "reload_weights"),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        "_bookkeeping_sync", "_sample", "get_model", "reload_weights",
    ),
    "vllm.v1.worker.gpu.sample.sampler.compute_topk_scores": (),
    "vllm.v1.worker.gpu_worker.Worker": ("reload_weights",),
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin": ("_set_active_loras",),
    "vllm.config.set_current_vllm_config": (),
    "vllm.config.aux_output.AuxOutputConfig": ("enable_return_routed_experts",),
    "vllm.config.cache.CacheConfig": ("cache_dtype",),
    "vllm.config.vllm.VllmConfig": ("aux_output_config",),
    "vllm.config.model.ModelConfig": (
        "dtype", "get_vocab_size", "hf_text_config", "logprobs_mode", "max_model_len", "model", "quantization",
    ),
    "vllm.config.parallel.ParallelConfig": ("world_size",),
    "vllm.config.scheduler.SchedulerConfig": ("async_scheduling", "max_num_seqs", "scheduler_cls"),
}  # fmt: skip
# The files that declare flags, variables and counters, if a version has them; and those of them that are used.
FLAGS = (
    "--model", "--served-model-name", "--uds", "--dtype", "--max-model-len", "--max-num-seqs", "--tensor-parallel-size",
    "--enable-scale-out", "--skip-tokenizer-init", "--generation-config", "--logprobs-mode", "--worker-extension-cls",
    "--middleware", "--disable-uvicorn-access-log", "--enforce-eager", "--distributed-executor-backend",
    "--weight-transfer-config", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--scheduler-cls",
    "--enable-return-routed-experts", "--enable-lora", "--max-loras", "--max-lora-rank",
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless", "--language-model-only", "--worker-cls",
)  # fmt: skip
FLAG_FILES = (
    "vllm/engine/arg_utils.py", "vllm/entrypoints/common/cli_args.py", "vllm/entrypoints/launchers/cli_args.py",
)  # fmt: skip
VARIABLES = (
    "VLLM_SERVER_DEV_MODE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "VLLM_RPC_BASE_PATH",
    "VLLM_NO_USAGE_STATS", "VLLM_HOST_IP", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_BATCH_INVARIANT", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
)  # fmt: skip
COUNTERS = ("vllm:generation_tokens", "vllm:prompt_tokens")
FINISH_REASONS = ("stop", "length", "abort")
ROUTES = re.compile(r"""@router\.(get|post)\(\s*["'](/[\w/]+)["']""")
USED_ROUTES = (
    "GET /get_world_size", "GET /health", "POST /finish_weight_update", "POST /init_weight_transfer_engine",
    "POST /reset_prefix_cache",
    "POST /shutdown_weight_transfer_engine", "POST /start_weight_update", "POST /update_weight_version",
    "POST /update_weights",
)  # fmt: skip
MAIN = "vllm.entrypoints.openai.api_server"


class Sources:
    """The Python files of a wheel or a folder."""

    def __init__(self, place: Path) -> None:
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        self._folder = place

    def names(self, under: str) -> list[str]:
        """List the files of a folder, and below."""
        if self._wheel:
            return [name for name in self._wheel.namelist() if name.startswith(under) and name.endswith(".py")]
        return [str(path.relative_to(self._folder)) for path in sorted((self._folder / under).rglob("*.py"))]

    def read(self, name: str) -> str:
        """Read a file; return nothing if it is missing."""
        if self._wheel:
            return self._wheel.read(name).decode() if name in self._wheel.namelist() else ""
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def version(self) -> str:
        """Return the version that the metadata names."""
        if self._wheel:
            (name,) = (name for name in self._wheel.namelist() if re.fullmatch(r"vllm[^/]*\.dist-info/METADATA", name))
            text = self._wheel.read(name).decode()
        else:
            (path,) = self._folder.glob("vllm*.dist-info/METADATA")
            text = path.read_text(encoding="utf-8")
        return re.search(r"^Version: (\S+)", text, re.MULTILINE)[1].partition("+")[0]

    @functools.cache  # noqa: B019  One for each run.
    def module(self, name: str) -> ast.Module | None:
        """Parse a module; return None if it is missing."""
        path = name.replace(".", "/")
        text = self.read(f"{path}.py") or self.read(f"{path}/__init__.py")
        return ast.parse(text) if text else None

    def find(self, module: str, name: str) -> ast.AST | None:
        """Find a class or a function, through the imports of the modules that hand it on."""
        tree = self.module(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and node in tree.body:
                return node
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module != module:
                        return self.find(node.module, alias.name)
        return None


def extract(sources: Sources) -> dict[str, object]:
    """Extract the facts of one vLLM; missing ones are null or left out."""
    flags = "\n".join(sources.read(name) for name in FLAG_FILES)
    routes = {
        f"{verb.upper()} {path}"
        for name in sources.names("vllm/entrypoints/")
        for verb, path in ROUTES.findall(sources.read(name))
    }
    reasons = sources.read("vllm/v1/engine/__init__.py")
    reasons = reasons.partition("FINISH_REASON_STRINGS = (")[2].partition(")")[0]
    return {
        "version": sources.version(),
        "symbols": {name: describe(sources, name, members) for name, members in SYMBOLS.items()},
        "is_a_program": 'if __name__ == "__main__"' in sources.read(f"{MAIN.replace('.', '/')}.py"),
        "flags": [flag for flag in FLAGS if _has_flag(flags, flag)],
        "variables": [name for name in VARIABLES if f'"{name}"' in sources.read("vllm/envs.py")],
        "counters": [name for name in COUNTERS if f'"{name}"' in sources.read("vllm/v1/metrics/loggers.py")],
        "finish_reasons": [reason for reason in FINISH_REASONS if f'"{reason}"' in reasons],
        "routes": [route for route in USED_ROUTES if route in routes],
    }


def _has_flag(text: str, flag: str) -> bool:
    field = flag.removeprefix("--").replace("-", "_")
    return f'"{flag}"' in text or re.search(rf"^    {field}: ", text, re.MULTILINE) is not None


def describe(sources: Sources, name: str, members: tuple[str, ...]) -> dict[str, object] | None:
    """Describe a class or a function: its call and its members; None if it is missing."""
    module, _, last = name.rpartition(".")
    node = sources.find(module, last)
    if node is None:
        return None
    if not isinstance(node, ast.ClassDef):
        return {"call": signature(node)}
    family = ancestry(sources, module, node)
    if members:
        return {"members": {member: _member(family, member) for member in members}}
    return {"call": constructor(family)}


def ancestry(sources: Sources, module: str, node: ast.ClassDef) -> list[ast.ClassDef]:
    """List a class and those of vLLM that it inherits from, the nearest first."""
    found = [node]
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        parent = sources.find(module, name.id) if isinstance(name, ast.Name) else None
        if isinstance(parent, ast.ClassDef):
            found += ancestry(sources, module, parent)
    return found


def constructor(family: list[ast.ClassDef]) -> str:
    """Return how a class is called, by its constructor or else by its fields."""
    for node in family:
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return signature(part)
    fields = {
        part.target.id: part
        for node in reversed(family)
        for part in node.body
        if isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation)
    }
    # Fields of a dataclass that says so are keywords, and so are those that say so themselves.
    is_keyword_class = any("kw_only=True" in ast.unparse(one) for one in family[0].decorator_list)
    positional, keywords = [], []
    for name, part in fields.items():
        value = "" if part.value is None else ast.unparse(part.value)
        is_keyword = is_keyword_class or "kw_only=True" in value
        has_default = bool(value) and ("field(" not in value or "default" in value)
        (keywords if is_keyword else positional).append(f"{name}=None" if has_default else name)
    return f"({', '.join(['self', *positional, *(['*', *keywords] if keywords else [])])})"


def _member(family: list[ast.ClassDef], name: str) -> str | None:
    for node in family:
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
                kinds = {"property", "abstractmethod", "classmethod"}
                marks = [ast.unparse(one) for one in part.decorator_list if ast.unparse(one) in kinds]
                start = "async " if isinstance(part, ast.AsyncFunctionDef) else ""
                return " ".join([*marks, start + signature(part)])
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return "field"
    # Or one that a method assigns.
    assigned = f"self.{name}"
    is_assigned = any(isinstance(one, ast.Attribute) and ast.unparse(one) == assigned for one in ast.walk(family[0]))
    return "field" if is_assigned else None


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters without annotations, and None for each default."""
    parameters = function.args
    every = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
    for one in [*every, parameters.vararg, parameters.kwarg]:
        if one is not None:
            one.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [None if one is None else ast.Constant(None) for one in parameters.kw_defaults]
    return f"({ast.unparse(parameters)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, metavar="WHEEL|FOLDER")
    print(json.dumps(extract(Sources(parser.parse_args().place)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
