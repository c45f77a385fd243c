"""The sidecar's own command line: our flags of the rollout and of rewards, without megatron."""

import argparse
import dataclasses
import glob
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from megatron_rl.config import ModelConfig, RewardConfig, RolloutConfig, RunConfig, TrainingConfig
from megatron_rl.errors import UsageError
from megatron_rl.flags import Flag, flags_of, nearest

_SUBJECTS: dict[str, type] = {
    "run": RunConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "rollout": RolloutConfig,
    "reward": RewardConfig,
}
# Of subjects that the sidecar reads only this much of.
_SHARED = {"run": {"--platform"}, "model": {"--hf-model"}, "training": {"--seq-length"}}

# What engines on a device can be sent weights by, beside files.
_STREAMS = {"cpu": None, "cuda": "nccl", "npu": "hccl"}

# What stands before the error of a sidecar that ends: the trainer that started it finds it in the log.
LAST_WORDS = "megatron_rl.sidecar: "

# Python alone; functions need what they need.
_LEAST_MEMORY_GIB = 0.125


@dataclasses.dataclass(frozen=True)
class SidecarSettings:
    """Everything that a sidecar's command line said, checked."""

    platform: Literal["auto", "cpu", "cuda", "npu"]
    hf_model: Path | None
    seq_length: int | None
    rollout: RolloutConfig
    reward: RewardConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.rollout.folder is not None
        return self.rollout.folder

    @property
    def run(self) -> str:
        """The run's name: that of its folder."""
        return self.folder.resolve().name

    @property
    def device(self) -> Literal["cpu", "cuda", "npu"]:
        """What the engines compute on."""
        return self.platform if self.platform != "auto" else detect()

    @property
    def address(self) -> tuple[str, int]:
        """Where to listen."""
        host, _, port = self.rollout.listen.rpartition(":")
        return host, int(port)


def detect() -> Literal["cpu", "cuda", "npu"]:
    """The kind of device of this host; the engines' environment may be another, so nothing is imported for it."""
    if glob.glob("/dev/davinci[0-9]*"):
        return "npu"
    return "cuda" if glob.glob("/dev/nvidia[0-9]*") else "cpu"


def flags() -> list[Flag]:
    """The flags that a sidecar takes, under the names that the trainer has for them."""
    return [
        flag
        for subject, config in _SUBJECTS.items()
        for flag in flags_of(config, subject)
        if subject not in _SHARED or flag.name in _SHARED[subject]
    ]


def parse(words: Sequence[str]) -> SidecarSettings:
    """The settings; a UsageError that says what to write otherwise."""
    known = flags()
    values: dict[str, dict[str, Any]] = {subject: {} for subject in _SUBJECTS}
    namespace, rest = _parser(known).parse_known_args(list(words))
    if rest:
        names = {name: None for flag in known for name in flag.names}
        raise UsageError(f"unknown flag {rest[0]}{nearest(rest[0], names)}: the sidecar takes its own flags only")
    for flag in known:
        said = getattr(namespace, flag.name, None)
        if said is not None:
            subject, _, field = flag.targets[0].partition(".")
            if flag.nargs is None and len(set(said)) > 1:
                raise UsageError(f"{flag.name} is given twice, with {' and '.join(said)}: drop one of them")
            value = flag.value(said)
            values[subject][field] = list(value) if isinstance(value, tuple) else value
    settings = SidecarSettings(
        platform=values["run"].get("platform", "auto"),
        hf_model=values["model"].get("hf_model"),
        seq_length=values["training"].get("seq_length"),
        rollout=RolloutConfig(**values["rollout"]),
        reward=RewardConfig(**values["reward"]),
    )
    _check(settings)
    return settings


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _parser(known: Sequence[Flag]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m megatron_rl.sidecar",
        description="Supervises the engines and hands finished groups to the trainer.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for flag in known:
        keywords: dict[str, Any] = {"action": "append"}
        if flag.is_switch:
            keywords = {"action": "append_const", "const": ()}
        elif flag.nargs is not None:
            # Several of a list are one list.
            keywords = {"action": "extend", "nargs": flag.nargs}
        parser.add_argument(*flag.names, dest=flag.name, help=flag.help.replace("%", "%%"), **keywords)
    return parser


def _check(settings: SidecarSettings) -> None:
    rollout = settings.rollout
    if rollout.folder is None:
        raise UsageError("--rollout-folder is missing: name the run's folder")
    host, _, port = rollout.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rollout-listen {rollout.listen} is no HOST:PORT: write 127.0.0.1:0, or another address")
    for name, value in (
        ("--rollout-num-engines", rollout.num_engines),
        ("--rollout-tensor-parallel-size", rollout.tensor_parallel_size),
        ("--rollout-max-num-seqs", rollout.max_num_seqs),
        ("--rollout-retain-journals", rollout.retain_journals),
        ("--reward-workers", settings.reward.workers),
    ):
        if value < 1:
            raise UsageError(f"{name} {value}: it must be at least 1")
    wanted = rollout.num_engines * rollout.tensor_parallel_size
    if rollout.devices is not None and len(rollout.devices) != wanted:
        raise UsageError(
            f"--rollout-devices names {len(rollout.devices)} devices, and {rollout.num_engines} engines of "
            f"{rollout.tensor_parallel_size} take {wanted}: name as many"
        )
    if rollout.script is not None and rollout.engine != "scripted":
        raise UsageError(
            f"--rollout-script {rollout.script} is for --rollout-engine scripted, and this is {rollout.engine}: "
            f"drop one of them"
        )
    if rollout.transport not in ("shm", _STREAMS[settings.device] if rollout.engine == "vllm" else None):
        kind = f"vLLM on {settings.device}" if rollout.engine == "vllm" else "a scripted engine"
        raise UsageError(f"--rollout-transport {rollout.transport} does not reach {kind}: write shm")
    if rollout.engine == "vllm":
        if settings.hf_model is None:
            raise UsageError("--hf-model is missing: engines start from a Hugging Face folder")
        if rollout.max_model_len is None and settings.seq_length is None:
            raise UsageError("--rollout-max-model-len is missing: write it, or --seq-length")
    _check_rewards(settings.reward)


def _check_rewards(reward: RewardConfig) -> None:
    if reward.functions is None:
        raise UsageError("--reward is missing: name a function FILE.py:FUNCTION, or a ready-made one")
    if not 0 < reward.timeout < math.inf:
        raise UsageError(f"--reward-timeout {reward.timeout:g}: write seconds above 0")
    if reward.memory_gib is not None and not _LEAST_MEMORY_GIB <= reward.memory_gib < math.inf:
        raise UsageError(
            f"--reward-memory-gib {reward.memory_gib:g}: a process that functions run in needs {_LEAST_MEMORY_GIB:g} "
            f"at least; write more, or leave it out"
        )
    for path in reward.readable or ():
        if not path.exists():
            raise UsageError(f"--reward-readable {path}: there is no such file or folder; name one that exists")
