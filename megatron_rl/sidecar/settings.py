"""A sidecar's settings: resolved from a run's or parsed from flags, checked, and handed over as one message.

The sidecar that a run starts reads the message. One that a person starts reads flags, without megatron. Both get the
same object.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_rl.algorithm.settings import AlgorithmConfig, name_teachers
from megatron_rl.config import hardware
from megatron_rl.config.hardware import CoreShares
from megatron_rl.config.serve import ServeConfig
from megatron_rl.config.settings import (
    DraftSettings,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_rl.environments.types import AGENT_COMPONENT, AGENT_FLAG, COMPONENT, VERIFIERS_FLAG
from megatron_rl.environments.types import FLAG as ENVIRONMENT_FLAG
from megatron_rl.environments.types import find_flag_problems as find_environment_problems
from megatron_rl.errors import InputError, UsageError
from megatron_rl.flag import Flag, derive_flags
from megatron_rl.flag_parser import ParsedFlags, make_parser, parse_words
from megatron_rl.rewards import spec as reward_spec
from megatron_rl.rewards.model_folders import check_folder
from megatron_rl.shared.device_memory import DIVIDED_BY_USER, FLAG_OF_SHARING, EngineMemory
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.shared.protocol.wire import WIRE_VERSION, decode_json, encode_json
from megatron_rl.shared.records.append_file import write_private
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.sidecar.hosts import FLAG as FLAG_OF_HOSTS
from megatron_rl.sidecar.hosts import find_host_problems
from megatron_rl.types import Architecture

_SUBJECTS: dict[str, type] = {
    "run": RunConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "observe": ObserveConfig,
    "rollout": RolloutConfig,
    "environment": EnvironmentConfig,
    "reward": RewardConfig,
    "algorithm": AlgorithmConfig,
}
# The flags that the sidecar reads of these subjects.
_SHARED = {
    "run": {"--platform"},
    "model": {"--hf-model", "--weights-bridge"},
    "training": {"--seq-length"},
    "evaluation": {"--eval-command"},
    "observe": {"--trace"},
    "algorithm": {"--teacher"},
}

# The flag of the gateway's address.
GATEWAY_FLAG = "--rollout-gateway-listen"
# The module that checks the settings for each kind of engine, imported when a run has that kind.
_CHECKS = {"vllm": "megatron_rl.sidecar.vllm.checks", "scripted": "megatron_rl.sidecar.engines.scripted"}
# The transports that stream weights to engines on a device.
_STREAMS: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": ("nccl",), "npu": ("hccl",)}

# Precedes the error of a sidecar that ends. The trainer that started it looks for this in the log.
LAST_WORDS = "megatron_rl.sidecar: "
# Precedes the path of a message, in place of all flags.
MESSAGE_FLAG = "--settings"


@dataclasses.dataclass(frozen=True)
class SidecarSettings:
    platform: Literal["auto", "cpu", "cuda", "npu"]
    hf_model: Path | None
    seq_length: int | None
    rollout: RolloutConfig
    reward: RewardConfig
    trace: Literal["on", "off"] = "on"
    needs_rewards: bool = True
    """False if the run learns from a teacher alone."""
    tries_rewards: bool = False
    """Whether the trainer that starts it hands over rows, on which it tries the rewards before it serves."""
    memory: EngineMemory | None = None
    """The memory of an engine that shares a rank's device; None if vLLM's own flags decide."""
    environment: EnvironmentConfig = EnvironmentConfig()
    weights_bridge: str | None = None
    """The family of the model as FILE.py:NAME; None for one of this package's."""
    eval_command: str | None = None
    teacher: list[str] | None = None
    lora_rank: int = 0
    serve: ServeConfig | None = None
    """The settings of Tinker's interface; None if a run trains."""

    def read_architecture(self) -> Architecture | None:
        """Read the architecture in --hf-model; None if there is none."""
        return None if self.hf_model is None else read_architecture(self.hf_model, self.weights_bridge)

    @property
    def teachers(self) -> dict[str, Path]:
        """The folders of teachers that engines compute, by the names of their models."""
        return name_teachers(self.teacher, are_served=True)

    @property
    def folder(self) -> Path:
        assert self.rollout.folder is not None
        return self.rollout.folder

    @property
    def run(self) -> str:
        """The run's name: that of its folder."""
        return self.folder.resolve().name

    @property
    def device(self) -> Literal["cpu", "cuda", "npu"]:
        """The kind of device that the engines compute on."""
        return self.platform if self.platform != "auto" else detect_device()

    @property
    def address(self) -> tuple[str, int]:
        place = parse_place(self.rollout.listen)
        assert place is not None
        return place


class SidecarMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a sidecar, from the trainer that starts it."""

    wire: int = WIRE_VERSION
    settings: SidecarSettings


def write_message(path: Path, settings: SidecarSettings) -> None:
    """Write settings for the sidecar that is started next; only the file's owner can read them."""
    write_private(path, encode_json(SidecarMessage(settings=settings)))


def read_settings(words: Sequence[str]) -> SidecarSettings:
    """Read the message that the words name, or else parse them as flags."""
    if MESSAGE_FLAG not in words:
        return parse(words)
    if len(words) != 2 or words[0] != MESSAGE_FLAG:
        raise UsageError(f"{MESSAGE_FLAG} takes the path of a message, and no other flags may be given")
    path = Path(words[1])
    try:
        return decode_json(path.read_bytes(), SidecarMessage).settings
    except OSError as error:
        raise InputError(f"{MESSAGE_FLAG} {path} cannot be read: {error}") from None
    except InputError as error:
        raise InputError(f"{MESSAGE_FLAG} {path}: {error}") from None


def resolve_for_run(settings: DraftSettings, folder: Path | None, cores: CoreShares, num_ranks: int) -> SidecarSettings:
    """Resolve the settings of the sidecar that a run starts beside these many ranks of its own host."""
    platform: Any = settings.platform
    rollout = settings.rollout
    num_threads = rollout.num_threads
    if platform == "cpu" and rollout.engine == "vllm":
        num_threads = cores.threads_of_worker
    # A run that is killed resumes from its checkpoint. With the journals since then no group is generated again.
    journals = max(rollout.retain_journals, (settings.checkpoint.save_interval or 0) + 1)
    sidecar = SidecarSettings(
        platform=platform,
        hf_model=settings.model.hf_model,
        weights_bridge=settings.model.weights_bridge,
        seq_length=settings.training.seq_length,
        rollout=dataclasses.replace(rollout, folder=folder, retain_journals=journals, num_threads=num_threads),
        reward=settings.reward,
        environment=settings.environment,
        trace=settings.observe.trace,
        eval_command=settings.evaluation.eval_command,
        teacher=settings.algorithm.teacher,
        needs_rewards=settings.algorithm.advantage != "none" and settings.run.stage == "grpo",
        tries_rewards=settings.run.stage == "grpo",
        lora_rank=settings.lora.rank,
        serve=settings.serve if settings.run.stage == "serve" else None,
    )
    return pick_devices(sidecar, num_ranks)


def detect_device() -> Literal["cpu", "cuda", "npu"]:
    """Find this host's kind of device without importing packages: engines may have another environment."""
    kinds: tuple[hardware.Kind, ...] = ("npu", "cuda")
    return next((kind for kind in kinds if hardware.list_files(kind)), "cpu")


def list_flags() -> list[Flag]:
    """List the flags of a sidecar, which have the same names as the trainer's."""
    return [
        flag
        for subject, config in _SUBJECTS.items()
        for flag in derive_flags(config, subject)
        if subject not in _SHARED or flag.name in _SHARED[subject]
    ]


def parse(words: Sequence[str]) -> SidecarSettings:
    """Parse and check flags; a UsageError has all mistakes, each with what to write instead."""
    known = list_flags()
    parsed = ParsedFlags(known, is_repeatable=False)
    description = "Supervises the engines and hands finished groups to the trainer."
    parser = make_parser("python -m megatron_rl.sidecar", description, known)
    parse_words(parser, words, parsed, ": the sidecar takes only its own flags")
    values = {subject: _to_lists(parsed.select_values(subject)) for subject in _SUBJECTS}
    settings = SidecarSettings(
        platform=values["run"].get("platform", "auto"),
        hf_model=values["model"].get("hf_model"),
        weights_bridge=values["model"].get("weights_bridge"),
        seq_length=values["training"].get("seq_length"),
        rollout=RolloutConfig(**values["rollout"]),
        reward=RewardConfig(**values["reward"]),
        environment=EnvironmentConfig(**values["environment"]),
        trace=values["observe"].get("trace", "on"),
        eval_command=values["evaluation"].get("eval_command"),
        teacher=values["algorithm"].get("teacher"),
    )
    settings = pick_devices(settings, num_ranks=0)
    architecture: Architecture | None = None
    unreadable: InputError | UsageError | None = None
    try:
        architecture = settings.read_architecture()
    except (InputError, UsageError) as error:
        unreadable = error
    parsed.consider((*_check_alone(settings, architecture), *problems(settings, architecture)))
    if isinstance(unreadable, InputError):
        parsed.consider_input(unreadable)
    elif unreadable is not None:
        parsed.consider(unreadable.problems)
    parsed.raise_problems()
    return settings


def _to_lists(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as a message has them: without tuples."""
    return {field: list(value) if isinstance(value, tuple) else value for field, value in values.items()}


def problems(settings: SidecarSettings, architecture: Architecture | None, longest: int | None = None) -> Iterator[str]:
    """Yield each mistake that would end a sidecar with these settings; the architecture is that of --hf-model.

    `longest` is the most tokens of a prompt and its response together; None if that is unknown. No file that a flag
    names is run. Only a running sidecar can see whether a port is free, whether a file of rewards imports, and how far
    the kernel can confine it.
    """
    yield from _problems_of_engines(settings, architecture)
    room = settings.rollout.max_model_len
    if room is not None and longest is not None and 0 < room < longest and settings.rollout.engine == "vllm":
        yield (
            f"--rollout-max-model-len {room} must be at least {longest}, the most tokens of a prompt and its response: "
            f"raise it, or leave it out"
        )
    for flag, address in (
        ("--rollout-listen", settings.rollout.listen),
        (GATEWAY_FLAG, settings.environment.gateway_listen),
    ):
        if parse_place(address) is None:
            yield (
                f"{flag} {address} must be HOST:PORT: write 127.0.0.1:0, or another address, one of IPv6 in brackets"
            )
    yield from reward_spec.problems(
        settings.reward, is_needed=settings.needs_rewards and not settings.environment.has_turns
    )
    reward, rollout = settings.reward, settings.rollout
    if reward.judge_vllm_args:
        yield from importlib.import_module(_CHECKS["vllm"]).find_judge_problems(reward.judge_vllm_args)
    has_judge = any(text.startswith("judge:") for text in reward.functions or ())
    engines = [("engines compute", "--rollout-devices", rollout.devices or ())]
    yield from _problems_of_server(settings, "judge", reward.judge_devices, has_judge, engines)
    others = [*engines, ("the judge computes", "--judge-devices", reward.judge_devices or ())]
    yield from _problems_of_server(settings, "teacher", rollout.teacher_devices, bool(settings.teachers), others)
    yield from _problems_of_teachers(settings)
    yield from _problems_of_environments(settings)


def _problems_of_server(
    settings: SidecarSettings,
    name: str,
    devices: Sequence[int] | None,
    is_there: bool,
    others: Sequence[tuple[str, str, Sequence[int]]],
) -> Iterator[str]:
    """Yield each mistake in the devices of a server apart from the engines; `others` have theirs."""
    flag = f"--{name}-devices"
    if settings.device == "cpu":
        if devices:
            yield f"{flag} names accelerators, and the {name} computes on the CPU: drop it"
    elif devices:
        yield from _problems_of_devices(flag, devices, hardware.list_visible_devices(settings.device))
        for who, other, taken in others:
            if shared := " ".join(str(number) for number in devices if number in taken):
                yield f"{flag}: {who} on {shared} ({other}): name other devices in one of them"
    elif is_there:
        yield f"{flag} is missing: name the {name}'s accelerators, apart from those of ranks and engines"


def _problems_of_teachers(settings: SidecarSettings) -> Iterator[str]:
    devices, number = settings.rollout.teacher_devices or (), len(settings.teachers)
    if devices and not number:
        yield "--teacher-devices needs --teacher NAME=engines:FOLDER: add it, or drop the flag"
    if number and settings.device != "cpu" and len(devices) % number:
        yield f"--teacher-devices must name as many devices for each of {number} teachers, and names {len(devices)}"
    for folder in settings.teachers.values():
        try:
            check_folder(str(folder), "--teacher engines")
        except ValueError as error:
            yield f"--teacher engines:{folder}: {error}"
    if number and settings.seq_length is None:
        yield "--seq-length is missing: name the most tokens of a sequence that teachers are asked about"


def _problems_of_devices(flag: str, devices: Sequence[int], visible: Sequence[str]) -> Iterator[str]:
    """Yield each mistake in the numbers of devices, of which the visible ones are known, or none."""
    named = " ".join(map(str, devices))
    if min(devices) < 0 or len(set(devices)) < len(devices):
        yield f"{flag} {named} must be different numbers, none negative: write each device once"
    if visible and max(devices) >= len(visible):
        yield (
            f"{flag} {named} must be below {len(visible)}, the number of devices that are visible here: devices are "
            "counted from 0 among those"
        )


def _problems_of_environments(settings: SidecarSettings) -> Iterator[str]:
    yield from find_environment_problems(settings.environment)
    yield from _problems_of_names(settings)
    rollout = settings.rollout
    for flag, name in (
        ("--rollout-tool-parser", rollout.tool_parser),
        ("--rollout-reasoning-parser", rollout.reasoning_parser),
    ):
        if name is not None and rollout.engine != "vllm":
            yield f"{flag} {name} is for --rollout-engine vllm, not {rollout.engine}: drop one"
        if name is not None and not settings.environment.has_turns:
            yield f"{flag} {name} reads turns of conversations: add {ENVIRONMENT_FLAG} or {AGENT_FLAG}, or drop it"
    if settings.environment.has_turns and settings.rollout.replay_routing:
        yield (
            f"--rollout-replay-routing replays whole responses, and with {ENVIRONMENT_FLAG} or {AGENT_FLAG} they have "
            "several turns: drop one"
        )


def _problems_of_names(settings: SidecarSettings) -> Iterator[str]:
    """Yield each reward function whose values would take the place of the environment's or agent's reward."""
    environment = settings.environment
    for flag, is_named, component in (
        (ENVIRONMENT_FLAG, environment.source, COMPONENT),
        (AGENT_FLAG, environment.agent, AGENT_COMPONENT),
        (VERIFIERS_FLAG, environment.verifiers, AGENT_COMPONENT),
    ):
        # Functions that cannot be read are a problem of their own.
        with contextlib.suppress(UsageError):
            if is_named is not None and component in reward_spec.find_weights(settings.reward):
                yield f"--reward {component} has the name of the reward that {flag} gives: rename the function"


def _check_alone(settings: SidecarSettings, architecture: Architecture | None) -> Iterator[str]:
    """Yield each mistake in settings that a trainer would set or check itself."""
    if settings.rollout.is_colocated:
        yield (
            f"{FLAG_OF_SHARING} is for the engines that a run starts itself, since the run counts what its ranks need: "
            f"drop it here, and divide the memory with {DIVIDED_BY_USER}"
        )
    if settings.rollout.folder is None:
        yield "--rollout-folder is missing: name the run's folder"
    length = settings.seq_length
    if architecture is None or length is None or settings.rollout.max_model_len is not None:
        return
    if settings.rollout.engine == "vllm" and length > (longest := architecture.longest_sequence):
        yield f"--seq-length {length} is above the model's longest sequence, {longest}: write {longest} or less"


def _problems_of_engines(settings: SidecarSettings, architecture: Architecture | None) -> Iterator[str]:
    rollout, device = settings.rollout, settings.device
    yield from _problems_of_hosts(rollout)
    wanted = rollout.num_engines * rollout.tensor_parallel_size
    if rollout.devices is not None:
        named = " ".join(map(str, rollout.devices))
        if len(rollout.devices) != wanted:
            yield (
                f"--rollout-devices must name {wanted} devices, {rollout.tensor_parallel_size} for each of "
                f"{rollout.num_engines} engines, and names {len(rollout.devices)}"
            )
        yield from _problems_of_devices("--rollout-devices", rollout.devices, list_visible(settings))
        if device == "cpu" and rollout.engine == "vllm":
            yield f"--rollout-devices {named} names accelerators, but the engines compute on the CPU: drop the flag"
    elif wanted > 0 and (visible := list_visible(settings)):
        # If there were enough, `pick_devices` would have named them.
        judge = ", its judge others" if settings.reward.judge_devices else ""
        judge += ", its teachers others" if settings.rollout.teacher_devices else ""
        yield (
            f"{rollout.num_engines} engines of {rollout.tensor_parallel_size} devices are too many: {len(visible)} "
            f"devices are visible here, and the run's ranks have the first{judge}. Start fewer ranks or engines, show "
            f"more devices ({hardware.VARIABLES[device]}), share the ranks' ({FLAG_OF_SHARING}), or start a sidecar "
            "elsewhere (--rollout-endpoint)"
        )
    if rollout.transport not in ("shm", *(_STREAMS[device] if rollout.engine == "vllm" else ())):
        kind = f"vLLM on {device}" if rollout.engine == "vllm" else "a scripted engine"
        yield f"--rollout-transport {rollout.transport} does not reach {kind}: write shm"
    if rollout.engine != "vllm":
        for flag, is_given in (
            ("--rollout-vllm-args", rollout.vllm_args),
            (f"--rollout-speculative {rollout.speculative}", rollout.speculative),
            ("--rollout-speculative-tokens", rollout.speculative_tokens),
            ("--batch-invariant", rollout.is_batch_invariant),
        ):
            if is_given:
                yield f"{flag} is for --rollout-engine vllm, not {rollout.engine}: drop one"
    checks = importlib.import_module(_CHECKS[rollout.engine])
    yield from checks.find_problems(rollout, device, settings.hf_model, architecture, settings.seq_length)


def _problems_of_hosts(rollout: RolloutConfig) -> Iterator[str]:
    """Yield each mistake in which other hosts have engines."""
    hosts = rollout.hosts
    if hosts is None:
        if rollout.num_engines == 0:
            yield (
                f"--rollout-num-engines 0 must be at least 1 without {FLAG_OF_HOSTS}: write 1 or more, or name hosts "
                "with engines"
            )
        return
    yield from find_host_problems(hosts, rollout.tensor_parallel_size)
    if rollout.engine != "vllm":
        yield f"{FLAG_OF_HOSTS} {hosts} is for --rollout-engine vllm, not {rollout.engine}: drop one"
    if rollout.is_colocated:
        yield f"{FLAG_OF_HOSTS} {hosts}: engines on other hosts cannot share the ranks' devices: drop {FLAG_OF_SHARING}"


def check_sharing(settings: SidecarSettings, num_ranks: int) -> Iterator[str]:
    """Yield each mistake in which devices engines share with the `num_ranks` ranks that compute on the first ones."""
    rollout = settings.rollout
    if rollout.is_colocated and rollout.transport != "shm":
        yield (
            f"{FLAG_OF_SHARING} with --rollout-transport {rollout.transport}: ranks and engines on one device cannot "
            "be in one group of its collectives: write --rollout-transport shm, which copies on the device"
        )
    if settings.device == "cpu" or rollout.engine != "vllm":
        # Turns are rehearsed on a CPU.
        if rollout.colocate == "share":
            yield f"{FLAG_OF_SHARING} is for vLLM on accelerators, where it divides a device's memory: drop it"
        return
    for flag, devices in (
        ("--judge-devices", settings.reward.judge_devices or ()),
        ("--teacher-devices", rollout.teacher_devices or ()),
    ):
        if shared := " ".join(str(number) for number in devices if number < num_ranks):
            yield f"{flag}: ranks compute on {shared}: name devices from {num_ranks} on"
    if rollout.devices is None:
        return
    named = " ".join(map(str, rollout.devices))
    shared = " ".join(str(number) for number in rollout.devices if number < num_ranks)
    if shared and not rollout.is_colocated:
        yield (
            f"--rollout-devices {named}: ranks compute on {shared}: name devices from {num_ranks} on, or write "
            f"{FLAG_OF_SHARING} too, which divides the memory between ranks and engines"
        )
    if rollout.is_colocated and not shared:
        yield f"{FLAG_OF_SHARING}: no rank computes on --rollout-devices {named}: drop one of the two"


def list_visible(settings: SidecarSettings) -> list[str]:
    """List the devices that this sidecar's engines may be given; none if none is known."""
    if settings.device == "cpu" or settings.rollout.engine == "scripted":
        return []
    return hardware.list_visible_devices(settings.device)


def pick_devices(settings: SidecarSettings, num_ranks: int) -> SidecarSettings:
    """Give engines devices, if none are named and enough are visible: those after the ranks', or the ranks' own.

    The judge's and the teachers' are left out.
    """
    rollout = settings.rollout
    if rollout.devices is not None or not list_visible(settings) or settings.device == "cpu":
        return settings
    num_wanted = rollout.num_engines * rollout.tensor_parallel_size
    first = 0 if rollout.is_colocated else num_ranks
    used = [*(settings.reward.judge_devices or ()), *(rollout.teacher_devices or ())]
    picked = hardware.pick_devices(settings.device, first, num_wanted, used)
    return dataclasses.replace(settings, rollout=dataclasses.replace(rollout, devices=picked))
