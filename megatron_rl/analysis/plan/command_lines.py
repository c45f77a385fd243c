"""The command lines that start a planned run."""

import dataclasses

from megatron_rl.analysis.plan.costs import BatchingCosts
from megatron_rl.analysis.plan.search import Candidate, Wanted
from megatron_rl.errors import UsageError

_SCHEDULES = ("periodic", "sync")


@dataclasses.dataclass(frozen=True)
class Files:
    """The files that the command lines name."""

    model: str
    prompts: str = "train.jsonl"
    reward: str = "gsm8k"
    run: str = "RUN"
    weights_bridge: str | None = None

    @property
    def model_flags(self) -> list[str]:
        """The flags that name the model."""
        bridge = [] if self.weights_bridge is None else ["--weights-bridge", self.weights_bridge]
        return ["--hf-model", self.model, *bridge]


def write_command(candidate: Candidate, wanted: Wanted, files: Files) -> list[list[str]]:
    """Return the words of each command: the trainer's, preceded by the sidecar's if it has a host of its own."""
    setting = candidate.setting
    if setting.schedule not in _SCHEDULES:
        raise UsageError(
            f"--schedule {setting.schedule} is simulated for comparison only, and no run can have it: write periodic "
            "or sync for a command line"
        )
    size, here = setting.trainer_devices, wanted.devices_per_host
    is_one_host = setting.num_devices <= here
    hosts = -(-size // here)
    rendezvous = ["--standalone"]
    if hosts > 1:
        rendezvous = [
            "--nnodes", str(hosts), "--node-rank", "$NODE_RANK", "--master-addr", "$MASTER", "--master-port", "29500",
        ]  # fmt: skip
    launcher = ["torchrun", *rendezvous, "--nproc-per-node", str(min(size, here))]
    trainer = [*launcher, "pretrain_grpo.py", *_list_trainer_flags(candidate, wanted, files)]
    engines = _list_engine_flags(candidate)
    if is_one_host:
        return [[*trainer, *engines, "--rollout-folder", files.run]]
    common = ["--rollout-folder", files.run, *files.model_flags, "--reward", files.reward]
    length = ["--seq-length", str(wanted.longest_prompt + wanted.longest_response)]
    listen = ["--rollout-listen", "10.0.0.1:8700"]
    sidecar = ["python", "-m", "megatron_rl.sidecar", *common, *length, *listen, *engines]
    if wanted.adapters is not None and wanted.adapters.is_published_alone:
        sidecar += ["--rollout-lora-rank", str(wanted.adapters.rank)]
    reached = ["--rollout-endpoint", "http://10.0.0.1:8700", "--rollout-folder", files.run]
    return [sidecar, [*trainer, *reached, "--publish-folder", "SHARED"]]


def list_notes(candidate: Candidate, wanted: Wanted) -> list[str]:
    """List what a person must add to the command lines."""
    notes = []
    setting = candidate.setting
    if setting.num_devices > wanted.devices_per_host:
        notes.append("10.0.0.1 stands for the engines' host; RUN and SHARED lie where all hosts reach them")
    if setting.num_devices > wanted.devices_per_host < setting.engine_devices:
        notes.append(
            f"a sidecar starts engines on its own host, which has {wanted.devices_per_host} devices, and these engines "
            f"need {setting.engine_devices}: no run can have them yet"
        )
    return notes


def _list_trainer_flags(candidate: Candidate, wanted: Wanted, files: Files) -> list[str]:
    setting, split = candidate.setting, candidate.split
    responses = setting.num_prompts * setting.group_size // setting.num_updates
    flags = [
        *files.model_flags, "--prompts", files.prompts, "--reward", files.reward,
        "--seq-length", str(wanted.longest_prompt + wanted.longest_response),
        "--max-prompt-tokens", str(wanted.longest_prompt), "--rollout-max-tokens", str(wanted.longest_response),
        "--grpo-prompts-per-step", str(setting.num_prompts), "--grpo-group-size", str(setting.group_size),
        "--micro-batch-size", str(setting.micro_batch_size), "--global-batch-size", str(responses),
        "--train-iters", "100", "--lr", "1e-6", "--lr-decay-style", "constant", "--bf16",
        "--use-distributed-optimizer", "--schedule", setting.schedule,
        "--tensor-model-parallel-size", str(split.tensor), "--pipeline-model-parallel-size", str(split.pipeline),
        "--context-parallel-size", str(split.context),
    ]  # fmt: skip
    if split.tensor > 1:
        flags.append("--sequence-parallel")
    if split.expert > 1:
        flags += ["--expert-model-parallel-size", str(split.expert), "--expert-tensor-parallel-size", "1"]
    if setting.num_virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(setting.num_virtual)]
    if wanted.num_frozen:
        flags += ["--grpo-kl-beta", "0.001"]
    if wanted.adapters is not None:
        form = "adapter" if wanted.adapters.is_published_alone else "merged"
        flags += ["--lora-rank", str(wanted.adapters.rank), "--publish-lora", form]
    if wanted.recomputes:
        flags += [
            "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
        ]  # fmt: skip
    return flags


def _list_engine_flags(candidate: Candidate) -> list[str]:
    engine = candidate.costs.engine
    running = engine.max_running if isinstance(engine, BatchingCosts) else engine.max_in_flight
    return [
        "--rollout-num-engines", str(candidate.split.num_engines),
        "--rollout-tensor-parallel-size", str(candidate.split.engine_tensor),
        "--rollout-max-num-seqs", str(running),
    ]  # fmt: skip
