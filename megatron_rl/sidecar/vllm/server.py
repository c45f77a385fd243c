"""A vLLM server seen from outside: how it is started, and which models and settings it cannot run.

The limits on models are taken from vLLM 0.32's sources, because vLLM may be installed in another environment. They are
checked before an engine starts; vLLM reports the rest in its log.
"""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import megatron_rl
from megatron_rl.config import hardware
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.shared.device_memory import EngineMemory, find_slot_rank
from megatron_rl.shared.protocol.wire import Transport
from megatron_rl.shared.weights.families import find_family, read_architecture
from megatron_rl.sidecar.engines.hosts import SERVER_KEEPS_SECONDS
from megatron_rl.sidecar.launcher import ProcessSpec
from megatron_rl.sidecar.temporary import SOCKET_FOLDER_BYTES
from megatron_rl.sidecar.vllm import parts as vllm_parts
from megatron_rl.sidecar.vllm.flags import (
    FLAG,
    list_memory_flags,
    names_flag,
    split_flags,
)
from megatron_rl.sidecar.vllm.parts import EnginePart
from megatron_rl.sidecar.vllm.routes import MIDDLEWARE
from megatron_rl.sidecar.vllm.scheduler import SCHEDULER
from megatron_rl.sidecar.vllm.speculation import VLLM_FLAG as SPECULATION_FLAG
from megatron_rl.sidecar.vllm.speculation import describe_for_vllm
from megatron_rl.types import MKL_MODE

_log = logging.getLogger(__name__)
MODEL_NAME = "policy"
LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""A setting of glibc for an engine on a CPU: packing weights at a publish takes half the time, reading no longer."""
_SCHEDULER_FLAG = "--scheduler-cls"
EXPERTS_FLAG = "--enable-return-routed-experts"
TEXT_FLAG = "--language-model-only"
COMPILATION_FLAG = "--compilation-config"
PLAIN_ROTATION = json.dumps({"custom_ops": ["-rotary_embedding"]})
"""The value of that flag with which vLLM rotates queries and keys in torch (`patches.find_wrong_rotations`)."""
# On a CPU with AMX, vLLM would choose a backend for bfloat16 alone, which drops weights that a publish must replace.
_ATTENTION_FLAGS = ("--attention-backend", "--attention-config", "-ac")
EXTENSION = "megatron_rl.sidecar.vllm.worker.WorkerExtension"
KEY_MIDDLEWARE = "megatron_rl.sidecar.vllm.key_check.KeyCheck"
INVARIANT_WORKER = "megatron_rl.sidecar.vllm.invariant.InvariantWorker"
# The variables that engines inherit from the sidecar's environment; the rest is set below or by the user.
_INHERITED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "TZ",
    "ATB_HOME_PATH", "HF_HOME", "GLIBC_TUNABLES", "TRANSFORMERS_CACHE",
)  # fmt: skip
_INHERITED_FAMILIES = (
    "NCCL_", "HCCL_", "GLOO_", "UCX_", "VLLM_", "CUDA_", "ASCEND_", "TRITON_", "TORCHINDUCTOR_", "XDG_",
    "PYTORCH_", "TORCH_", "FLASHINFER_",
)  # fmt: skip
# Variables of those families that engines do not inherit. Some would change who may connect to the engine, or where its
# processes meet. Others are for the trainer: one queue on a device, and no backend that torch loads by itself. With the
# last one, an engine gets the memory that an earlier engine with another --gpu-memory-utilization had.
_WITHHELD = (
    "VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_LOGGING_CONFIG_PATH", "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "VLLM_ENABLE_STARTUP_PLAN",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The configuration of a vLLM server, except for its address."""

    model: str
    """The folder of the checkpoint that it starts from; the first publish replaces the weights."""
    max_model_len: int
    """The most tokens of a prompt and its response together."""
    max_num_seqs: int = 64
    """The most responses that it samples at a time."""
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    devices: tuple[int, ...] = ()
    """The numbers of this engine's accelerators; empty leaves the choice to vLLM."""
    num_threads: int = 1
    """The threads of a worker on a CPU."""
    cache_gib: int = 1
    """GiB of memory for keys and values on a CPU."""
    memory: EngineMemory | None = None
    """The memory on devices that ranks share; None leaves vLLM's share to its own flags."""
    part: EnginePart | None = None
    """The part that this host runs of an engine over several hosts; None for an engine of one host."""
    python: str = sys.executable
    """The interpreter of the environment that vLLM is installed in."""
    transport: Transport = "shm"
    scoring: Literal["ours", "vllm"] = "ours"
    """The owner of the kernel that computes the log-probs of sampled tokens on GPUs."""
    replays_routing: bool = False
    """True: an engine returns the experts of each token."""
    speculation: str | None = None
    """The value of vLLM's flag for drafts; None for no drafts."""
    is_batch_invariant: bool = False
    """True: a token's log-prob does not depend on what is computed beside it."""
    lora_rank: int = 0
    """The largest rank of adapters that it takes; 0 for none."""
    attends_plainly: bool = False
    """True: vLLM computes attention in plain ways, since its faster ones for CPUs are wrong or refuse updates here."""
    sleeps: bool = False
    """True: the engine gives its devices to ranks between publishes."""
    is_text_only: bool = False
    """True: the folder holds a vision model, which engines neither load nor compute with."""
    eager: bool | None = None
    """Whether to run without compilation and captured graphs; None means on a CPU alone, where they bring no gain."""
    flags: tuple[str, ...] = ()
    """Further flags for vLLM, which follow ours."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further variables of its environment, which overrule ours."""


def configure_server(
    rollout: RolloutConfig,
    model: Path,
    seq_length: int | None,
    device: Literal["cpu", "cuda", "npu"],
    num_threads: int,
    memory: EngineMemory | None = None,
    weights_bridge: str | None = None,
) -> ServerConfig:
    """Derive the configuration of a sidecar's engines from its settings."""
    length = rollout.max_model_len or seq_length
    assert length is not None
    architecture = read_architecture(model, weights_bridge)
    flags = tuple(split_flags(rollout.vllm_args))
    if names_flag(flags, _SCHEDULER_FLAG):
        _log.info("engines use the scheduler of %s: outputs are sent as it sends them", FLAG)
    return ServerConfig(
        model=str(model),
        max_model_len=length,
        max_num_seqs=rollout.max_num_seqs,
        device=device,
        # Explicit: by default vLLM computes float32 weights in half precision.
        dtype=rollout.dtype or architecture.dtype,
        tensor_parallel_size=rollout.tensor_parallel_size,
        num_threads=num_threads,
        memory=memory,
        python=str(rollout.python or sys.executable),
        scoring=rollout.scoring,
        replays_routing=rollout.replay_routing,
        speculation=describe_for_vllm(rollout),
        is_batch_invariant=rollout.is_batch_invariant,
        lora_rank=rollout.lora_rank,
        attends_plainly=device == "cpu" and architecture.latents is not None,
        is_text_only=find_family(architecture.family).images is not None,
        transport=rollout.transport,
        sleeps=rollout.takes_turns,
        flags=flags,
    )


def make_process_spec(config: ServerConfig, name: str, folder: Path, log: Path) -> ProcessSpec:
    """Describe the process of the engine `name`, and make its private folder."""
    address = folder / "api.sock"
    _make_private(folder)
    address.unlink(missing_ok=True)
    return ProcessSpec(name, _command(config, address), _environment(config, folder), log, str(address))


def make_open_spec(
    config: ServerConfig, folder: Path, log: Path, place: tuple[str, int], key: str, flags: Sequence[str] = ()
) -> ProcessSpec:
    """Describe a vLLM server with a tokenizer, apart from engines: clients with the key reach it at a host and port."""
    _make_private(folder)
    host, port = place
    environment = {**_environment(config, folder), "VLLM_API_KEY": key}
    # A client must not pause it or change its weights.
    del environment["VLLM_SERVER_DEV_MODE"]
    place_flags = ("--host", host, "--port", str(port), "--middleware", KEY_MIDDLEWARE)
    command = (*_list_model_flags(config), *place_flags, *config.flags, *flags)
    return ProcessSpec("serve", command, environment, log, f"{host}:{port}")


def _list_model_flags(config: ServerConfig) -> list[str]:
    """List the beginning of a server's command: what computes which model, and how."""
    eager = config.device == "cpu" if config.eager is None else config.eager
    command = [
        config.python, "-m", "megatron_rl.sidecar.vllm.api_server",
        "--model", config.model,
        "--served-model-name", MODEL_NAME,
        "--dtype", config.dtype,
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs),
        "--tensor-parallel-size", str(config.tensor_parallel_size),
        # Without the sampling parameters of the checkpoint's generation_config.json.
        "--generation-config", "vllm",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if config.is_text_only:
        command.append(TEXT_FLAG)
    if config.speculation is not None:
        command += [SPECULATION_FLAG, config.speculation]
    if config.is_batch_invariant and config.device == "cpu":
        command += ["--worker-cls", INVARIANT_WORKER]
    if eager:
        command.append("--enforce-eager")
    # Where the user has flags of the same kind, the engine is tried with them, and refused if they lack this one.
    if config.attends_plainly and not names_flag(config.flags, COMPILATION_FLAG, "-cc"):
        command += [COMPILATION_FLAG, PLAIN_ROTATION]
    if config.attends_plainly and not names_flag(config.flags, *_ATTENTION_FLAGS):
        command += [_ATTENTION_FLAGS[0], "CPU_MLA"]
    if config.device == "cpu" and config.tensor_parallel_size == 1:
        # As on other devices, the only worker runs in the core's process, so that steps cross no process boundary.
        command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    return command


def _command(config: ServerConfig, address: Path) -> tuple[str, ...]:
    command = [
        *_list_model_flags(config),
        "--uds", str(address),
        # Token ids in and out.
        "--enable-scale-out", "--skip-tokenizer-init",
        # Log-probs of logits/T, as the trainer computes them; vLLM's default is before temperature.
        "--logprobs-mode", "processed_logprobs",
        "--worker-extension-cls", EXTENSION,
        "--middleware", MIDDLEWARE,
    ]  # fmt: skip
    # vllm-ascend chooses among schedulers of its own.
    if config.device != "npu" and not names_flag(config.flags, _SCHEDULER_FLAG):
        command += [_SCHEDULER_FLAG, SCHEDULER]
    if config.replays_routing:
        command.append(EXPERTS_FLAG)
    if config.lora_rank:
        rank = str(find_slot_rank(config.lora_rank))
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", rank]
    if config.part is not None:
        command += vllm_parts.list_flags(config.part)
    if config.memory is not None:
        command += list_memory_flags(config.memory)
    if config.sleeps and config.device != "cpu":
        command.append("--enable-sleep-mode")
    if config.transport != "shm":
        # vllm-ascend registers its HCCL engine under the name of vLLM's for NCCL.
        backend = "nccl" if config.transport == "hccl" else config.transport
        command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    return (*command, *config.flags)


def _environment(config: ServerConfig, folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if _is_inherited(name)}
    environment |= {
        "PYTHONPATH": find_packages(config.python, folder),
        "PYTHONUNBUFFERED": "1",
        # vLLM's own sockets, and the files of torch's rendezvous.
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
        # The routes that pause and update. They need no key, because the private folder keeps other users out.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPS_SECONDS),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if config.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(config.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": environment.get("VLLM_CPU_KVCACHE_SPACE", str(config.cache_gib)),
            "TORCHDYNAMO_DISABLE": "1",
            "GLIBC_TUNABLES": environment.get("GLIBC_TUNABLES", LARGE_PAGES),
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if config.is_batch_invariant:
            environment |= MKL_MODE
    elif config.devices:
        environment[hardware.VARIABLES[config.device]] = hardware.name_devices(config.device, config.devices)
    if config.device == "cuda":
        # FlashInfer's sampler gives no log-probs of what was sampled from, so no request uses it, and the start would
        # compile it.
        environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if config.is_batch_invariant:
            environment["VLLM_BATCH_INVARIANT"] = "1"
    if config.device == "npu":
        # Weights kept in the NPU's own layout cannot be written in place.
        environment["VLLM_ASCEND_ENABLE_NZ"] = "0"
    if config.part is not None:
        vllm_parts.set_variables(environment, config.part)
    return {**environment, **config.environment}


def find_packages(python: str, folder: Path) -> str:
    """Return an engine's PYTHONPATH: this package, then the user's own paths if the engine runs our interpreter."""
    own = os.environ.get("PYTHONPATH")
    packages = str(link_package(folder))
    return os.pathsep.join((packages, own)) if own and python == sys.executable else packages


def _is_inherited(name: str) -> bool:
    return name in _INHERITED or (name.startswith(_INHERITED_FAMILIES) and name not in _WITHHELD)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{folder} must belong to you and have mode 700 (owner {found.st_uid}, mode {found.st_mode & 0o777:o}): "
            "a user who reaches an engine's socket can replace its weights"
        )
    if len(os.fsencode(folder)) > SOCKET_FOLDER_BYTES:
        raise UsageError(
            f"the path {folder} has {len(os.fsencode(folder))} bytes and must have at most "
            f"{SOCKET_FOLDER_BYTES}, for the sockets in it: choose a shorter one"
        )


def link_package(folder: Path) -> Path:
    """Make a folder with this package alone: the engine's interpreter has all other packages itself."""
    packages = folder / "python"
    packages.mkdir(mode=0o700, exist_ok=True)
    link = packages / "megatron_rl"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(megatron_rl.__file__).resolve().parent)
    return packages
