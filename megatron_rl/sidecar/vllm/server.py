"""How a vLLM server is started: its flags, its environment, its folder."""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import megatron_rl
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.launcher import ProcessSpec

MODEL_NAME = "policy"
EXTENSION = "megatron_rl.sidecar.vllm.worker.WorkerExtension"
# A unix socket's path has room for 107 bytes; vLLM's own sockets are named by 36 characters below the same folder.
_MAX_FOLDER_BYTES = 70
# What the environment of the sidecar gives to engines; all else is named below or by the user.
_INHERITED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "TZ",
    "CUDA_HOME", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH", "ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH",
    "HF_HOME", "TRANSFORMERS_CACHE", "HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """A vLLM server, apart from where it listens."""

    model: str
    """Folder of the checkpoint it starts from; the weights are replaced at the first publish."""
    max_model_len: int
    """Tokens of a prompt and its response together."""
    max_num_seqs: int = 64
    """Responses that it samples at a time."""
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    devices: tuple[int, ...] = ()
    """The accelerators of this engine, by number; none leaves the choice to vLLM."""
    num_threads: int = 1
    """Threads of a worker, on a CPU."""
    cache_gib: int = 1
    """Memory for keys and values, on a CPU."""
    python: str = sys.executable
    """The interpreter of the environment that vLLM is installed in."""
    transport: Literal["shm", "nccl", "hccl"] = "shm"
    eager: bool | None = None
    """Without compilation and captured graphs; None is yes on a CPU, where compiling takes longer than it gives."""
    flags: tuple[str, ...] = ()
    """More flags for vLLM, after ours."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """More of its environment, over ours."""


def spec(config: ServerConfig, name: str, folder: Path, log: Path) -> ProcessSpec:
    """How the engine `name` is started, in a private folder of its own that this makes."""
    address = folder / "api.sock"
    _make_private(folder)
    address.unlink(missing_ok=True)
    return ProcessSpec(name, _command(config, address), _environment(config, folder), log, str(address))


def run_folder(parent: str | None = None) -> Path:
    """A new private folder for the sockets of a sidecar's engines: with a short path, and on a disk of this host."""
    return Path(tempfile.mkdtemp(prefix="mrl-", dir=parent or os.environ.get("XDG_RUNTIME_DIR") or None))


def _command(config: ServerConfig, address: Path) -> tuple[str, ...]:
    eager = config.device == "cpu" if config.eager is None else config.eager
    command = [
        config.python, "-m", "megatron_rl.sidecar.vllm.api_server",
        "--model", config.model,
        "--served-model-name", MODEL_NAME,
        "--uds", str(address),
        "--dtype", config.dtype,
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs),
        "--tensor-parallel-size", str(config.tensor_parallel_size),
        # Token ids in and out; the sampling parameters of the checkpoint's generation_config.json stay out of it.
        "--enable-scale-out", "--skip-tokenizer-init", "--generation-config", "vllm",
        # Of logits/T, as the trainer computes them; vLLM's default is before temperature.
        "--logprobs-mode", "processed_logprobs",
        "--worker-extension-cls", EXTENSION,
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if eager:
        command.append("--enforce-eager")
    if config.transport != "shm":
        # vllm-ascend registers its HCCL engine under the name of the one that it stands in for.
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return (*command, *config.flags)


def _environment(config: ServerConfig, folder: Path) -> dict[str, str]:
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= {
        "PYTHONPATH": str(_package_folder(folder)),
        "PYTHONUNBUFFERED": "1",
        # vLLM's own sockets, and the files of torch's rendezvous.
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
        # The routes that pause and update. They ask for no key: the folder keeps everyone else out.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if config.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(config.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(config.cache_gib),
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    elif config.devices:
        environment[_VISIBLE_DEVICES[config.device]] = ",".join(map(str, config.devices))
    if config.device == "npu":
        # Weights kept in the NPU's own layout cannot be written in place.
        environment["VLLM_ASCEND_ENABLE_NZ"] = "0"
    return {**environment, **config.environment}


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{folder} is open to other users (owner {found.st_uid}, mode {found.st_mode & 0o777:o}), and whoever "
            "reaches an engine's socket can replace its weights: choose a folder of your own with mode 700"
        )
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        raise UsageError(
            f"{folder} is {len(os.fsencode(folder))} bytes long, and the sockets below it leave room for "
            f"{_MAX_FOLDER_BYTES}: choose a shorter one"
        )


def _package_folder(folder: Path) -> Path:
    """A folder that holds this package and nothing else: the engine's interpreter has its own of all the others."""
    packages = folder / "python"
    packages.mkdir(mode=0o700, exist_ok=True)
    link = packages / "megatron_rl"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(megatron_rl.__file__).resolve().parent)
    return packages
