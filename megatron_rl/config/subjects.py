"""Our own configuration: one frozen dataclass a subject, one field a flag. Nothing here needs torch.

A field's name, type, default, help and bound are the flag's: argparse and docs/flags.md are generated from them. A new
subject is a dataclass here and a field of `settings.Subjects`.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from megatron_rl.config.flag import megatron_flag, own_flag


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where the run happens."""

    platform: Literal["auto", "cpu", "cuda", "npu"] = own_flag(
        "auto", "The kind of device; `auto` takes the best of this machine."
    )
    print_config: bool = own_flag(False, "Print every value and where it came from, then exit.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    hf_model: Path | None = own_flag(None, "The Hugging Face folder of the architecture and the first weights.")
    make_vocab_size_divisible_by: int = megatron_flag(
        128, "The vocabulary is padded to a multiple of this number times the tensor-parallel size.", bound="at least 1"
    )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How the responses of a group see their prompt."""

    backend: Literal["auto", "merge", "gather", "triton", "flash", "flex", "naive"] = own_flag(
        "auto",
        "What computes shared-prompt attention; `auto` takes the fastest that can run.",
        "--shared-prompt-backend",
    )
    is_shared: bool = own_flag(
        True, "Give each response a copy of its prompt: the same numbers from more tokens.", "--no-shared-prompt"
    )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How much is trained, in which portions."""

    micro_batch_size: int = megatron_flag(1, "Responses in a micro-batch.", bound="at least 1")
    global_batch_size: int | None = megatron_flag(
        None, "Responses in an update, over all replicas.", bound="at least 1"
    )
    max_tokens_per_gpu: int | None = own_flag(
        None,
        "The most tokens that a rank has at once: `--micro-batch-size` becomes the largest that keeps to it.",
        bound="at least 1",
    )
    seq_length: int | None = megatron_flag(
        None,
        "The most tokens of a prompt and its response together; twice `--rollout-max-tokens` if only that is given.",
        bound="at least 1",
    )
    train_iters: int | None = megatron_flag(None, "Iterations to run.", bound="at least 1")
    seed: int = megatron_flag(1234, "The seed of the initial weights; all other seeds are derived from it.")


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """How learning rate and weight decay change from update to update."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = megatron_flag(
        "linear", "The shape of the decay from `--lr` to `--min-lr`."
    )
    lr_decay_iters: int | None = megatron_flag(
        None, "Updates that the decay takes; those of the whole run if not given.", bound="at least 1"
    )
    lr_warmup_iters: int = megatron_flag(
        0, "Updates during which the rate rises from `--lr-warmup-init` to `--lr`.", bound="at least 0"
    )
    lr_warmup_fraction: float | None = megatron_flag(
        None, "The warm-up as a fraction of `--lr-decay-iters`.", bound="at least 0 and below 1"
    )
    lr_warmup_init: float = megatron_flag(0.0, "The rate that the warm-up starts from.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = megatron_flag(
        "exponential", "The shape of the last phase of WSD."
    )
    lr_wsd_decay_iters: int | None = megatron_flag(None, "Updates in the last phase of WSD.", bound="at least 1")
    start_weight_decay: float | None = megatron_flag(
        None, "Weight decay at the first update, with `--weight-decay-incr-style`."
    )
    end_weight_decay: float | None = megatron_flag(
        None, "Weight decay at the last update, with `--weight-decay-incr-style`."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = megatron_flag(
        "constant", "The shape of the change of weight decay."
    )
    override_opt_param_scheduler: bool = megatron_flag(
        False,
        "Take the schedule from the flags, not from the checkpoint.",
        "--override-opt-param-scheduler",
        "--override-opt_param-scheduler",
    )
    use_checkpoint_opt_param_scheduler: bool = megatron_flag(
        False,
        "Take the schedule from the checkpoint, not from the flags.",
        "--use-checkpoint-opt-param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and loaded, in Megatron's distributed format."""

    save: Path | None = megatron_flag(None, "The folder that checkpoints are written to.")
    save_hf: Path | None = own_flag(None, "The folder that the weights are written to in Hugging Face's format.")
    save_interval: int | None = megatron_flag(
        None,
        "Iterations between checkpoints; without it only the last iteration is saved.",
        "--save-interval",
        "--persistent-save-interval",
        bound="at least 1",
    )
    save_retain_interval: int | None = megatron_flag(
        None, "Iterations between checkpoints that are never deleted.", bound="at least 1"
    )
    load: Path | None = megatron_flag(None, "The folder that the newest checkpoint is read from.")
    ckpt_step: int | None = megatron_flag(None, "The iteration to load, in place of the newest.")
    exit_on_missing_checkpoint: bool = megatron_flag(False, "End if `--load` holds no checkpoint.")
    finetune: bool = megatron_flag(False, "Load weights only: no optimizer, no random numbers, iteration 0.")
    no_save_optim: bool = megatron_flag(False, "Leave the optimizer out of checkpoints.")
    no_save_rng: bool = megatron_flag(False, "Leave the state of random numbers out of checkpoints.")
    no_load_optim: bool = megatron_flag(False, "Start with a new optimizer.")
    no_load_rng: bool = megatron_flag(False, "Start with new random numbers.")
    keep_last: int | None = own_flag(
        None, "How many of the newest checkpoints are kept; all if not given.", "--save-keep-last", bound="at least 1"
    )
    async_save: bool = megatron_flag(False, "Write checkpoints while training continues.")
    ckpt_fully_parallel_save: bool = megatron_flag(
        True, "Let one replica write everything, not each its share.", "--no-ckpt-fully-parallel-save"
    )
    ckpt_fully_parallel_load: bool = megatron_flag(
        False, "Let each replica read its share and exchange it with the others."
    )
    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = megatron_flag(
        "assume_ok_unexpected", "What to do about tensors that only the checkpoint has, or only the model."
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """How ranks find and reach each other."""

    distributed_timeout_minutes: int = megatron_flag(10, "How many minutes a collective may take.", bound="at least 1")
    use_gloo_process_groups: bool = megatron_flag(
        True, "Make no gloo groups besides those of the backend.", "--disable-gloo-process-groups"
    )


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The sidecar: its engines, and how it is reached."""

    engine: Literal["vllm", "scripted"] = own_flag(
        "vllm", "What samples responses; `scripted` rehearses without a model, with random tokens.", "--rollout-engine"
    )
    script: Path | None = own_flag(
        None,
        "How scripted engines behave: a JSON file of vocab_size, lengths, tokens_per_second, delay and delay_seed.",
        "--rollout-script",
    )
    num_engines: int = own_flag(1, "How many engines are started.", "--rollout-num-engines", bound="at least 1")
    tensor_parallel_size: int = own_flag(
        1, "Devices that an engine is divided over.", "--rollout-tensor-parallel-size", bound="at least 1"
    )
    devices: list[int] | None = own_flag(
        None,
        "The engines' accelerators, in order, counted among the visible ones; those after the ranks' if not given.",
        "--rollout-devices",
    )
    start_minutes: float = own_flag(
        10.0, "How long engines may take to start.", "--rollout-start-minutes", bound="a finite duration above 0"
    )
    num_threads: int | None = own_flag(
        None,
        "Threads of each process of an engine on a CPU; a share of the host's cores if not given.",
        "--rollout-num-threads",
        bound="at least 1",
    )
    python: Path | None = own_flag(
        None, "The Python of the environment that vLLM is installed in; this one if not given.", "--rollout-python"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = own_flag(
        None, "The precision that engines compute in; the stored weights' if not given.", "--rollout-dtype"
    )
    max_model_len: int | None = own_flag(
        None,
        "The most tokens of a prompt and its response; `--seq-length` if not given.",
        "--rollout-max-model-len",
        bound="at least 1",
    )
    max_num_seqs: int = own_flag(
        64, "Responses that an engine samples at once.", "--rollout-max-num-seqs", bound="at least 1"
    )
    max_in_flight: int | None = own_flag(
        None,
        "Responses that an engine is given at once; twice `--rollout-max-num-seqs` if not given.",
        "--rollout-max-in-flight",
        bound="at least 1",
    )
    vllm_args: str = own_flag(
        "",
        "More flags of vLLM's server, for every engine, as one text: `--rollout-vllm-args='--kv-cache-dtype fp8'`.",
        "--rollout-vllm-args",
    )
    transport: Literal["shm", "nccl", "hccl"] = own_flag(
        "shm",
        "How weights reach the engines: through files that they share with the trainer, or from device to device.",
        "--rollout-transport",
    )
    folder: Path | None = own_flag(
        None, "The run's folder: token, address, journal, audit log and the engines' logs.", "--rollout-folder"
    )
    listen: str = own_flag(
        "127.0.0.1:0",
        "Where the sidecar listens, HOST:PORT or [HOST]:PORT; port 0 is a free port, 0.0.0.0 and [::] all addresses.",
        "--rollout-listen",
    )
    retain_journals: int = own_flag(
        2, "How many iterations' groups the journal keeps.", "--rollout-retain-journals", bound="at least 1"
    )
    lease_seconds: float = own_flag(
        60.0,
        "How long the sidecar stays reserved for a trainer that has fallen silent.",
        "--rollout-lease-seconds",
        bound="a finite duration above 0",
    )


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """What responses are rewarded for."""

    functions: list[str] | None = own_flag(
        None, "Reward functions: FILE.py:FUNCTION or a built-in name, then =WEIGHT, then @SECONDS.", "--reward"
    )
    on_error: str = own_flag("stop", "`stop`, or the reward to substitute when a function fails.", "--reward-on-error")
    workers: int = own_flag(2, "Processes that run reward functions.", "--reward-workers")
    confine: Literal["auto", "require", "off"] = own_flag(
        "auto",
        "Keep reward functions from the run's folder and other processes; `auto` as far as possible.",
        "--reward-confine",
    )
    timeout: float = own_flag(
        30.0, "Seconds that a function may take for a group, unless its @SECONDS says otherwise.", "--reward-timeout"
    )
    readable: list[Path] | None = own_flag(
        None,
        "Files and folders that confined functions may read, besides the folders of their own files.",
        "--reward-readable",
    )
    environment: list[str] | None = own_flag(
        None, "Names of the environment variables that reward functions are given.", "--reward-environment"
    )
    memory_gib: float | None = own_flag(
        None,
        "The most address space of a process that runs reward functions; unlimited if not given.",
        "--reward-memory-gib",
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which prompts are trained on."""

    prompts: list[Path] | None = own_flag(None, "Files of prompts, JSONL or Parquet.", "--prompts")
    eval_prompts: list[Path] | None = own_flag(None, "Files of prompts that are only evaluated.", "--eval-prompts")
    held_out: int = own_flag(
        0, "How many prompts of `--prompts` are held out for evaluation, drawn by seed.", "--prompts-held-out"
    )
    prompt_key: str = own_flag(
        "prompt", "The column with the prompt: text, or a list of chat messages.", "--prompt-key"
    )
    answer_key: str = own_flag(
        "answer", "The column that reward functions know as `answer`; all others keep their names.", "--answer-key"
    )
    chat: bool = own_flag(
        False, "Turn a plain-text prompt into a user's message of the chat template.", "--prompt-chat"
    )
    system_message: str | None = own_flag(None, "The system message before every chat.", "--prompt-system-message")
    max_prompt_tokens: int | None = own_flag(
        None,
        "Leave out longer prompts and count them; without it a prompt without room for a response is an error.",
        "--max-prompt-tokens",
    )
    shuffle: bool = own_flag(True, "Take prompts in the order of the files.", "--no-shuffle-prompts")


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled for training."""

    max_tokens: int | None = own_flag(
        None,
        "The most tokens of a response; what `--max-prompt-tokens` leaves of `--seq-length`, or half, if not given.",
        "--rollout-max-tokens",
    )
    temperature: float = megatron_flag(
        1.0,
        "The sampling temperature; the trainer divides its logits by it too.",
        "--rollout-temperature",
        "--rl-default-temperature",
    )
    stop_token_ids: list[int] | None = own_flag(
        None, "Tokens that end a response, besides the model's own.", "--rollout-stop-tokens"
    )
    ignore_eos: bool = own_flag(False, "Keep sampling after the end-of-text token.", "--rollout-ignore-eos")


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """How the trainer reaches its sidecar."""

    endpoint: str | None = own_flag(
        None,
        "The address of a running sidecar, `http://HOST:PORT`; without it rank 0 starts one and ends it.",
        "--rollout-endpoint",
    )
    token_file: Path | None = own_flag(None, "The file with the token of `--rollout-endpoint`.", "--rollout-token-file")
    deadline_minutes: float = own_flag(
        60.0,
        "How long the groups of an iteration may take before the iteration fails.",
        "--rollout-deadline-minutes",
        bound="a finite duration above 0",
    )
    patience_seconds: float = own_flag(
        60.0,
        "How long the sidecar may be out of reach before that is an error.",
        "--rollout-patience-seconds",
        bound="a finite duration above 0",
    )


@dataclasses.dataclass(frozen=True)
class PublishConfig:
    """How weights reach the engines."""

    folder: Path | None = own_flag(
        None, "The folder that trainer and engines share; this user's in /dev/shm if not given.", "--publish-folder"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = own_flag(
        None, "The precision that weights are published in; the stored weights' if not given.", "--publish-dtype"
    )
    deadline_minutes: float = own_flag(
        10.0, "How long a publish may take.", "--publish-deadline-minutes", bound="a finite duration above 0"
    )
    probe_bound: float | None = own_flag(
        None,
        "The largest mean difference between engine's and trainer's log-probs on a version's probe; beyond it the "
        "publish fails. By precision and device if not given, `inf` for none.",
        "--publish-probe-bound",
        bound="above 0",
        remedy="write a mean difference of log-probs, or inf for no bound",
    )
    agreement_bound: float | None = own_flag(
        None,
        "The largest mean difference between the log-probs of two engines on a version's probe; beyond it the publish "
        "fails. By the engines' precisions and devices if not given, `inf` for none.",
        "--publish-agreement-bound",
        bound="above 0",
        remedy="write a mean difference of log-probs, or inf for no bound",
    )


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Group-relative policy optimization: what is maximized, and how far an update may go."""

    group_size: int = megatron_flag(
        8,
        "Responses to a prompt.",
        "--grpo-group-size",
        bound="at least 2",
        remedy="a response is compared with the others of its group; write 2 or more",
    )
    prompts_per_step: int | None = megatron_flag(
        None,
        "Prompts in an iteration; those of one `--global-batch-size` if not given.",
        "--grpo-prompts-per-step",
        bound="at least 1",
    )
    filter_groups: bool = megatron_flag(
        False,
        "Sample other prompts in place of those whose responses all got the same reward.",
        "--grpo-filter-groups-with-same-reward",
    )
    spare_prompts: int | None = own_flag(
        None,
        "How many others an iteration may take at most; twice its prompts if not given.",
        "--grpo-spare-prompts",
        bound="at least 1",
    )
    clamp_eps_lower: float = megatron_flag(
        0.2,
        "How far below 1 a ratio counts.",
        "--grpo-clamp-eps-lower",
        bound="between 0 and 1",
        remedy="write how far below 1 a ratio counts",
    )
    clamp_eps_upper: float = megatron_flag(
        0.2,
        "How far above 1 a ratio counts.",
        "--grpo-clamp-eps-upper",
        bound="at least 0",
        remedy="write how far above 1 a ratio counts",
    )
    kl_beta: float = megatron_flag(
        0.0,
        "The weight of the divergence (KL) from the reference.",
        "--grpo-kl-beta",
        bound="finite and at least 0",
        remedy="a negative weight would reward divergence; write 0 or more",
    )
    ref_model: Path | None = own_flag(
        None, "The Hugging Face folder of the reference; the run's first weights if not given.", "--grpo-ref-model"
    )
    ref_interval: int | None = own_flag(
        None,
        "Iterations between copies of the policy's weights into the reference; none is made if not given.",
        "--grpo-ref-interval",
        bound="at least 1",
    )
    name: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "gspo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "gdpo",
            "cispo",
            "sapo",
            "ppo_clip",
        ]
        | None
    ) = own_flag(
        None,
        "What is called by this name: sets the flags below as docs/algorithms.md says, each of which can still be "
        "written.",
        "--algorithm",
    )
    advantage: Literal["grpo", "mean", "rloo", "batch", "global", "gdpo"] = own_flag(
        "grpo",
        "Rewards minus their mean, divided by their deviation (grpo), by that over the update's responses (batch), or "
        "not (mean); or minus the others' mean (rloo), or minus the mean of the iteration before, divided as batch is "
        "(global); or each reward's own (grpo), added up and divided as batch is (gdpo).",
        "--grpo-advantage",
    )
    reward_min: float = own_flag(-math.inf, "Rewards below this count as this.", "--grpo-reward-min")
    reward_max: float = own_flag(math.inf, "Rewards above this count as this.", "--grpo-reward-max")
    loss: Literal["clip", "gspo", "cispo", "sapo", "reinforce"] = own_flag(
        "clip", "The loss of a token, from its ratio and its advantage.", "--grpo-loss"
    )
    dual_clip: float | None = own_flag(
        None,
        "The ratio above which a token of negative advantage is clipped too.",
        "--grpo-dual-clip",
        bound="above 1",
        remedy="the loss has a bound of its own below 1; write 3, for example",
    )
    sapo_temperature_pos: float = own_flag(
        1.0, "How steep the gate of `--grpo-loss sapo` is where advantages are positive.", bound="above 0"
    )
    sapo_temperature_neg: float = own_flag(1.05, "And where they are not.", bound="above 0")
    aggregation: Literal["token", "sequence", "constant"] = own_flag(
        "token",
        "What an update averages: its tokens, its responses' means, or its responses' sums divided by the most "
        "tokens that a response may have.",
        "--grpo-aggregation",
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "unbiased"] = own_flag(
        "k3", "How the divergence of a token is estimated.", "--grpo-kl-estimator"
    )
    kl_in: Literal["loss", "reward"] = own_flag(
        "loss",
        "Whether the divergence is a term of the loss, or is taken from the reward of each token and of those before "
        "it.",
        "--grpo-kl-in",
    )
    entropy_coef: float = own_flag(
        0.0,
        "The weight of the policy's entropy, which the loss is less by.",
        "--grpo-entropy-coef",
        bound="finite and at least 0",
    )
    importance_correction: bool = megatron_flag(
        False,
        "Weight each token by the trainer's probability divided by the engine's.",
        "--rl-inference-logprobs-is-correction",
    )
    importance_truncation: float | None = megatron_flag(
        None,
        "The largest weight of `--rl-inference-logprobs-is-correction`.",
        "--rl-importance-sampling-truncation-coef",
        bound="above 0",
        remedy="0 zeroes every weight, a negative cap flips its sign",
    )
    correction_lower: float | None = own_flag(
        None,
        "The smallest weight of `--rl-inference-logprobs-is-correction`.",
        "--grpo-correction-lower",
        bound="at least 0",
    )
    correction_level: Literal["token", "sequence", "geometric"] = own_flag(
        "token",
        "What is weighed: each token, each response by the product of its tokens' weights, or by their geometric mean.",
        "--grpo-correction-level",
    )
    correction_mode: Literal["truncate", "mask"] = own_flag(
        "truncate", "What becomes of a weight beyond its bounds: the bound, or zero.", "--grpo-correction-mode"
    )
    reject_below: float | None = own_flag(
        None,
        "Responses do not count whose tokens' weights have a geometric mean below this.",
        "--grpo-reject-below",
        bound="above 0",
    )
    reject_above: float | None = own_flag(
        None,
        "Responses do not count whose tokens' weights have a geometric mean above this.",
        "--grpo-reject-above",
        bound="above 0",
    )


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How generation and training share an iteration."""

    schedule: Literal["periodic", "sync"] = own_flag(
        "periodic", "Train groups as they finish, or once all of them have.", "--schedule"
    )
    consume_order: Literal["completion", "prompt"] = own_flag(
        "completion",
        "Bind micro-batches to groups as they finish, or to prompts: then no update depends on the order.",
        "--consume-order",
    )
    frozen_offload: bool = own_flag(
        False,
        "Keep frozen models in host memory; each layer comes to the device while the one before computes.",
        "--frozen-offload",
    )
    tri_model: Literal["fused", "separate"] = own_flag(
        "fused", "How frozen models run: in the policy's passes, or in passes of their own.", "--tri-model"
    )
    max_tokens_per_microbatch: int | None = own_flag(
        None,
        "The most tokens that a micro-batch may have; checked before the run starts.",
        "--max-tokens-per-microbatch",
    )
    exit_interval: int | None = megatron_flag(
        None,
        "Save and end once so many iterations are done, or a multiple of them.",
        "--exit-interval",
        bound="at least 1",
    )
    exit_minutes: int | None = megatron_flag(
        None,
        "Save and end after the iteration in which the run gets older than so many minutes.",
        "--exit-duration-in-mins",
        bound="at least 1",
    )
    grace_seconds: float = own_flag(
        60.0,
        "How long the current iteration may take to finish after SIGTERM.",
        "--exit-grace-seconds",
        bound="finite and at least 0",
        remedy="write 0 to exit at once, or more",
    )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How the policy is evaluated on held-out prompts."""

    interval: int | None = megatron_flag(None, "Iterations between evaluations.", "--eval-interval", bound="at least 1")
    num_prompts: int | None = own_flag(
        None, "The most prompts of an evaluation.", "--eval-num-prompts", bound="at least 1"
    )
    num_samples: int = own_flag(
        1, "Responses to each prompt: the k of pass@k.", "--eval-num-samples", bound="at least 1"
    )
    temperature: float = own_flag(
        0.0, "The sampling temperature of evaluations; 0 takes the likeliest token.", "--eval-temperature"
    )
    pass_reward: float = own_flag(1.0, "The lowest reward of a response that passes.", "--eval-pass-reward")


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What a person sees of a run."""

    log_interval: int = megatron_flag(1, "Iterations between printed lines.", bound="at least 1")
    progress: Literal["auto", "live", "lines", "none"] = own_flag(
        "auto", "A live display, or a line per iteration; `auto` takes the display on a terminal."
    )
    verbose: bool = own_flag(
        False,
        "Print automatic choices and other packages' warnings too, which otherwise go to the run's folder alone.",
        "--verbose",
    )
    log_samples: int = own_flag(
        4,
        "Responses of each iteration that are written to samples.jsonl.",
        "--log-samples",
        bound="at least 0",
        remedy="write 0 for none",
    )
    mismatch_warning: float | None = own_flag(
        None,
        "The mean difference between engine's and trainer's log-probs to warn about; by precision if not given.",
        "--rollout-mismatch-warning",
    )
    mismatch_error: float | None = own_flag(
        None,
        "The mean difference that ends the run before the update. If not given, five times the warning's, as far as "
        "the engines' precision sets it; `inf` for none.",
        "--rollout-mismatch-error",
        bound="above 0",
        remedy="write a mean difference of log-probs, or inf for no bound",
    )
    tensorboard_dir: Path | None = megatron_flag(None, "The folder of TensorBoard's event files.")
    wandb_project: str = megatron_flag("", "The project in Weights & Biases; none if empty.")
    wandb_exp_name: str = megatron_flag("", "The name of the run in Weights & Biases.")
    wandb_save_dir: str = megatron_flag("", "The folder of Weights & Biases' local files.")
    wandb_entity: str = megatron_flag("", "The owner of the project in Weights & Biases.")
