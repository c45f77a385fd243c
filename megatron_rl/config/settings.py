"""Our own configuration: one frozen dataclass a subject, one field a flag. Nothing here needs torch.

A field's name, type, default and help are the flag's: argparse and docs/flags.md are generated from them. A new
subject is a dataclass and a field of `Subjects`; Megatron's own dataclasses are in `megatron_rl.arguments`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_rl.config.flag import Option
from megatron_rl.config.loop import (
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    LoopConfig,
    ObserveConfig,
    PublishConfig,
    SamplingConfig,
    ServiceConfig,
    Subject,
    duration_problems,
)
from megatron_rl.types import Architecture, ParallelSizes


@dataclasses.dataclass(frozen=True)
class RunConfig(Subject):
    """Where the run happens."""

    platform: Annotated[
        Literal["auto", "cpu", "cuda", "npu"],
        Option("The kind of device; auto takes the best that the machine has.", megatron=False),
    ] = "auto"
    print_config: Annotated[bool, Option("Print every value with where it came from, and end.", megatron=False)] = False


@dataclasses.dataclass(frozen=True)
class ModelConfig(Subject):
    """Which model is trained."""

    hf_model: Annotated[
        Path | None,
        Option("A Hugging Face folder: the architecture and the first weights come from it.", megatron=False),
    ] = None
    make_vocab_size_divisible_by: Annotated[
        int, Option("The vocabulary is padded to a multiple of this times the tensor-parallel size.")
    ] = 128


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Subject):
    """How the responses of a group see their prompt."""

    backend: Annotated[
        Literal["auto", "merge", "gather", "triton", "flash", "flex", "naive"],
        Option(
            "What computes shared-prompt attention; auto takes the fastest that can run.",
            names=("--shared-prompt-backend",),
            megatron=False,
        ),
    ] = "auto"
    is_shared: Annotated[
        bool,
        Option(
            "Give each response a copy of its prompt: the same numbers from more tokens.",
            names=("--no-shared-prompt",),
            megatron=False,
        ),
    ] = True


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Subject):
    """How much is trained, in which portions."""

    micro_batch_size: Annotated[int, Option("Responses in a micro-batch.")] = 1
    global_batch_size: Annotated[int | None, Option("Responses in an update, over all replicas.")] = None
    seq_length: Annotated[int | None, Option("The most tokens that a prompt and a response have together.")] = None
    train_iters: Annotated[int | None, Option("Iterations to run.")] = None
    seed: Annotated[int, Option("Seed of initial weights; others are derived from it.")] = 1234


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(Subject):
    """How learning rate and weight decay change from update to update."""

    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        Option("The shape of the decay from `--lr` to `--min-lr`."),
    ] = "linear"
    lr_decay_iters: Annotated[int | None, Option("Updates that the decay takes; all of them if not given.")] = None
    lr_warmup_iters: Annotated[int, Option("Updates in which the rate rises from `--lr-warmup-init` to `--lr`.")] = 0
    lr_warmup_fraction: Annotated[
        float | None, Option("The updates of the warm-up as a fraction of `--lr-decay-iters`.")
    ] = None
    lr_warmup_init: Annotated[float, Option("The rate that the warm-up starts from.")] = 0.0
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], Option("The shape of the last phase of WSD.")
    ] = "exponential"
    lr_wsd_decay_iters: Annotated[int | None, Option("Updates in the last phase of WSD.")] = None
    start_weight_decay: Annotated[
        float | None, Option("Weight decay at the first update, with `--weight-decay-incr-style`.")
    ] = None
    end_weight_decay: Annotated[
        float | None, Option("Weight decay at the last update, with `--weight-decay-incr-style`.")
    ] = None
    weight_decay_incr_style: Annotated[
        Literal["constant", "linear", "cosine"], Option("The shape of the change of weight decay.")
    ] = "constant"
    override_opt_param_scheduler: Annotated[
        bool,
        Option(
            "Take the schedule from the flags, not from the checkpoint.",
            names=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        ),
    ] = False
    use_checkpoint_opt_param_scheduler: Annotated[
        bool,
        Option(
            "Take the schedule from the checkpoint, not from the flags.",
            names=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ),
    ] = False


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Subject):
    """What is saved and loaded, in Megatron's distributed format."""

    save: Annotated[Path | None, Option("The folder that checkpoints are written to.")] = None
    save_hf: Annotated[
        Path | None,
        Option("The folder that the weights are written to in Hugging Face's format.", megatron=False),
    ] = None
    save_interval: Annotated[
        int | None,
        Option(
            "Iterations from one checkpoint to the next; without it only the end is saved.",
            names=("--save-interval", "--persistent-save-interval"),
        ),
    ] = None
    save_retain_interval: Annotated[
        int | None, Option("Iterations between checkpoints that are kept when newer ones are written.")
    ] = None
    load: Annotated[Path | None, Option("The folder that the newest checkpoint is read from.")] = None
    ckpt_step: Annotated[int | None, Option("The iteration to load, in place of the newest.")] = None
    ckpt_format: Annotated[
        Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"],
        Option(
            "The format of checkpoints.",
            allowed=("torch_dist",),
            remedy="no other is read or written; convert the checkpoint with Megatron's tools",
        ),
    ] = "torch_dist"
    exit_on_missing_checkpoint: Annotated[bool, Option("End if `--load` holds no checkpoint.")] = False
    finetune: Annotated[bool, Option("Load weights only: no optimizer, no random numbers, iteration 0.")] = False
    no_save_optim: Annotated[bool, Option("Leave the optimizer out of checkpoints.")] = False
    no_save_rng: Annotated[bool, Option("Leave the state of random numbers out of checkpoints.")] = False
    no_load_optim: Annotated[bool, Option("Start with a new optimizer.")] = False
    no_load_rng: Annotated[bool, Option("Start with new random numbers.")] = False
    keep_last: Annotated[
        int | None,
        Option("The newest checkpoints that are kept; all if not given.", names=("--save-keep-last",), megatron=False),
    ] = None
    async_save: Annotated[bool, Option("Write checkpoints while training continues.")] = False
    ckpt_fully_parallel_save: Annotated[
        bool,
        Option("Let one replica write, not each its share.", names=("--no-ckpt-fully-parallel-save",)),
    ] = True
    ckpt_fully_parallel_load: Annotated[bool, Option("Let each replica read its share, and exchange them.")] = False
    dist_ckpt_strictness: Annotated[
        Literal[
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ],
        Option("What to do about tensors that only the checkpoint or only the model has."),
    ] = "assume_ok_unexpected"


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Subject):
    """How ranks find and reach each other."""

    distributed_timeout_minutes: Annotated[int, Option("How long a collective may take.")] = 10
    use_gloo_process_groups: Annotated[
        bool,
        Option("Make no gloo groups beside those of the backend.", names=("--disable-gloo-process-groups",)),
    ] = True


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Subject):
    """The sidecar: its engines, and how it is reached."""

    engine: Annotated[
        Literal["vllm", "scripted"],
        Option(
            "What samples; scripted rehearses without a model: tokens by chance.",
            names=("--rollout-engine",),
            megatron=False,
        ),
    ] = "vllm"
    script: Annotated[
        Path | None,
        Option(
            "How scripted engines behave, a JSON file: vocab_size, lengths, tokens_per_second, delay, delay_seed.",
            names=("--rollout-script",),
            megatron=False,
        ),
    ] = None
    num_engines: Annotated[
        int, Option("Engines that are started.", names=("--rollout-num-engines",), megatron=False)
    ] = 1
    tensor_parallel_size: Annotated[
        int,
        Option("Devices that an engine is divided over.", names=("--rollout-tensor-parallel-size",), megatron=False),
    ] = 1
    devices: Annotated[
        list[int] | None,
        Option(
            "The accelerators of the engines, in order; all that vLLM sees if not given.",
            names=("--rollout-devices",),
            megatron=False,
        ),
    ] = None
    num_threads: Annotated[
        int, Option("Threads of an engine, on a CPU.", names=("--rollout-num-threads",), megatron=False)
    ] = 1
    python: Annotated[
        Path | None,
        Option(
            "The interpreter of the environment that vLLM is installed in; this one if not given.",
            names=("--rollout-python",),
            megatron=False,
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(
            "The precision that engines compute in; that of the stored weights if not given.",
            names=("--rollout-dtype",),
            megatron=False,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "The most tokens of a prompt and its response; `--seq-length` if not given.",
            names=("--rollout-max-model-len",),
            megatron=False,
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Option("Responses that an engine samples at a time.", names=("--rollout-max-num-seqs",), megatron=False)
    ] = 64
    max_in_flight: Annotated[
        int | None,
        Option(
            "Responses that an engine is given at a time; twice `--rollout-max-num-seqs` if not given.",
            names=("--rollout-max-in-flight",),
            megatron=False,
        ),
    ] = None
    transport: Annotated[
        Literal["shm", "nccl", "hccl"],
        Option(
            "How weights reach the engines: files that they share with the trainer, or from device to device.",
            names=("--rollout-transport",),
            megatron=False,
        ),
    ] = "shm"
    folder: Annotated[
        Path | None,
        Option(
            "The run's folder: token, address, journal, audit log, logs of the engines.",
            names=("--rollout-folder",),
            megatron=False,
        ),
    ] = None
    listen: Annotated[
        str,
        Option(
            "Where the sidecar listens, HOST:PORT; port 0 takes a free one.",
            names=("--rollout-listen",),
            megatron=False,
        ),
    ] = "127.0.0.1:0"
    retain_journals: Annotated[
        int, Option("Iterations whose groups are kept.", names=("--rollout-retain-journals",), megatron=False)
    ] = 2
    lease_seconds: Annotated[
        float,
        Option(
            "How long a silent trainer keeps another run from taking the sidecar.",
            names=("--rollout-lease-seconds",),
            megatron=False,
        ),
    ] = 60.0

    def problems(self) -> Iterator[str]:
        yield from duration_problems("--rollout-lease-seconds", self.lease_seconds)


@dataclasses.dataclass(frozen=True)
class RewardConfig(Subject):
    """What responses are rewarded for."""

    functions: Annotated[
        list[str] | None,
        Option(
            "Functions, each FILE.py:FUNCTION or a ready-made name, then =WEIGHT, then @SECONDS.",
            names=("--reward",),
            megatron=False,
        ),
    ] = None
    on_error: Annotated[
        str,
        Option(
            "stop, or the value that a function that fails is taken to have given.",
            names=("--reward-on-error",),
            megatron=False,
        ),
    ] = "stop"
    workers: Annotated[int, Option("Processes that rewards run in.", names=("--reward-workers",), megatron=False)] = 2
    confine: Annotated[
        Literal["auto", "require", "off"],
        Option(
            "Keep rewards from the run's folder and from other processes; auto as far as possible.",
            names=("--reward-confine",),
            megatron=False,
        ),
    ] = "auto"
    timeout: Annotated[
        float,
        Option(
            "Seconds that a function may take for a group, where no @SECONDS says otherwise.",
            names=("--reward-timeout",),
            megatron=False,
        ),
    ] = 30.0
    readable: Annotated[
        list[Path] | None,
        Option(
            "Files and folders that confined functions may read, beside the folders of their own files.",
            names=("--reward-readable",),
            megatron=False,
        ),
    ] = None
    environment: Annotated[
        list[str] | None,
        Option(
            "Names of environment variables that functions are given.",
            names=("--reward-environment",),
            megatron=False,
        ),
    ] = None
    memory_gib: Annotated[
        float | None,
        Option(
            "The most address space of a process that functions run in; without bound if not given.",
            names=("--reward-memory-gib",),
            megatron=False,
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subjects:
    """The table of our own configuration: a field a subject."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    service: ServiceConfig = ServiceConfig()
    publish: PublishConfig = PublishConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Subjects):
    """Everything that a command line said, checked, and what follows from it."""

    platform: str
    # The ranks of the run; None where it is not known yet: no launcher has started this process.
    world_size: int | None
    architecture: Architecture
    # megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig. Whoever builds something of
    # them takes a copy: Megatron writes into its own.
    transformer: Any
    optimizer: Any
    ddp: Any
    # Where a value came from, under "subject.field"; what is not here is a default.
    sources: Mapping[str, str]
    # What was asked for and has no effect, to be said once at start.
    notes: tuple[str, ...] = ()

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Over how many ranks each dimension is divided."""
        config = self.transformer
        return ParallelSizes(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            virtual_pipeline=config.virtual_pipeline_model_parallel_size,
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
        )
