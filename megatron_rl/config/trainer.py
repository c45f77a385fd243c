"""The settings of the trainer: one frozen dataclass a subject, one field a flag. Nothing here needs torch.

A field's name, type, default, help and bound are the flag's: argparse and docs/flags.md are generated from them. A new
subject is a dataclass and a field of `settings.Subjects`. Those of the sidecar are in `rollout`, those of the loss in
`algorithm`.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_rl.flag import megatron_flag, own_flag
from megatron_rl.types import SAMPLED


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The stage of the run, and its kind of device."""

    stage: Literal["grpo", "sft", "dpo", "serve"] = own_flag(
        "grpo",
        "Train on responses that the policy samples, (supervised fine-tuning) on responses in the data, or (direct "
        "preference optimization) on pairs of responses in the data, of which one was preferred; or `serve` Tinker's "
        "interface.",
    )
    platform: Literal["auto", "cpu", "cuda", "npu"] = own_flag(
        "auto", "The kind of device; `auto` selects the best of this machine."
    )
    print_config: bool = own_flag(False, "Print every value and where it came from, then exit.")

    @property
    def is_sampled(self) -> bool:
        """Check whether engines sample from what is trained."""
        return self.stage in SAMPLED


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    hf_model: Path | None = own_flag(None, "The Hugging Face folder of the architecture and the first weights.")
    weights_bridge: str | None = own_flag(
        None,
        "A model family of your own, FILE.py:NAME, that reads `--hf-model`; at the start the model is compared with "
        "transformers' own.",
    )
    make_vocab_size_divisible_by: int = megatron_flag(
        128, "The vocabulary is padded to a multiple of this number times the tensor-parallel size.", bound="at least 1"
    )
    output_layer_backend: Literal["auto", "triton", "torch"] = own_flag(
        "auto", "The implementation of the output layer with its log-probs; `auto` selects the fastest that can run."
    )
    elementwise_backend: Literal["auto", "triton", "torch"] = own_flag(
        "auto",
        "The implementation of SwiGLU, of a residual with its norm, of linear layers and of Adam; `auto` takes the "
        "fastest that can run.",
    )
    qkv_backend: Literal["auto", "triton", "torch"] = own_flag(
        "auto",
        "The implementation of what queries and keys go through before attention: their norms and rope; `auto` takes "
        "the fastest that can run.",
    )
    linear_attention_backend: Literal["auto", "flash-linear", "torch"] = own_flag(
        "auto", "The implementation of the gated delta rule in linear layers; `auto` selects the fastest that can run."
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the weights."""

    rank: int = own_flag(
        0, "The rank of the adapters of linear layers; 0 trains all weights.", "--lora-rank", bound="at least 0"
    )
    alpha: float | None = own_flag(
        None,
        "The adapters' products are multiplied by this number over their rank; twice the rank if not given.",
        "--lora-alpha",
        bound="above 0",
    )
    targets: list[str] | None = own_flag(
        None,
        "The linear layers that have adapters, by the ends of their names in the Hugging Face model; all of "
        "attention and of MLPs, experts among them, if not given.",
        "--lora-targets",
    )
    dropout: float = own_flag(
        0.0, "Dropout before the adapters; only 0 is possible.", "--lora-dropout", bound="at least 0 and below 1"
    )
    load: Path | None = own_flag(None, "The folder of PEFT's that the first adapters are read from.", "--load-lora")

    @property
    def used_alpha(self) -> float:
        """The alpha that is computed with: twice the rank if none was given."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Attention of a group's responses to their prompt."""

    backend: Literal["auto", "merge", "gather", "triton", "flash", "cudnn", "naive"] = own_flag(
        "auto",
        "The implementation of shared-prompt attention; `auto` selects the fastest that can run.",
        "--shared-prompt-backend",
    )
    times: Path | None = own_flag(
        None,
        "Measured times that `auto` takes the fastest implementation from, a file of `make gpu-bench`.",
        "--shared-prompt-times",
    )
    blocks: str = own_flag(
        "auto",
        "The rows that programs of `triton` have at once: numbers, or `chip`; `auto` takes measured ones, or `chip`.",
        "--shared-prompt-blocks",
    )
    is_shared: bool = own_flag(
        True, "Give each response a copy of its prompt: the same numbers from more tokens.", "--no-shared-prompt"
    )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The amount of training, and its portions."""

    micro_batch_size: int = megatron_flag(
        1,
        "Responses in a micro-batch; on accelerators without `--max-tokens-per-gpu`, the number that fits them.",
        bound="at least 1",
    )
    global_batch_size: int | None = megatron_flag(
        None, "Responses in an update, over all replicas.", bound="at least 1"
    )
    max_tokens_per_gpu: int | None = own_flag(
        None,
        "The most tokens that a rank has at once: `--micro-batch-size` becomes the largest that fits.",
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
    """Learning rate and weight decay from update to update."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = megatron_flag(
        "linear", "The shape of the decay from `--lr` to `--min-lr`."
    )
    lr_decay_iters: int | None = megatron_flag(
        None, "Updates of the decay; all of the run if not given.", bound="at least 1"
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
        "Use the schedule of the flags, not of the checkpoint.",
        "--override-opt-param-scheduler",
        "--override-opt_param-scheduler",
    )
    use_checkpoint_opt_param_scheduler: bool = megatron_flag(
        False,
        "Use the schedule of the checkpoint, not of the flags.",
        "--use-checkpoint-opt-param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, in Megatron's distributed format."""

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
    exit_on_missing_checkpoint: bool = megatron_flag(False, "End if `--load` contains no checkpoint.")
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
        True, "Let one replica write everything, in place of each its share.", "--no-ckpt-fully-parallel-save"
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
        "assume_ok_unexpected", "The reaction to tensors that only the checkpoint has, or only the model."
    )

    @property
    def written(self) -> dict[str, Path]:
        """The folders that checkpoints are written to, by their flags."""
        folders = {"--save": self.save, "--save-hf": self.save_hf}
        return {flag: folder for flag, folder in folders.items() if folder is not None}


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Process groups of the ranks."""

    distributed_timeout_minutes: int = megatron_flag(
        10, "The most minutes that a collective may take.", bound="at least 1"
    )
    use_gloo_process_groups: bool = megatron_flag(
        True, "Make no gloo groups in addition to the backend's groups.", "--disable-gloo-process-groups"
    )


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The shares of generation and training in an iteration, and the end of a run."""

    schedule: Literal["periodic", "sync"] = own_flag(
        "periodic", "Train groups as they finish, or once all of them have."
    )
    consume_order: Literal["completion", "prompt"] = own_flag(
        "completion",
        "Bind micro-batches to groups as they finish, or to prompts; then updates do not depend on the order.",
    )
    frozen_offload: bool = own_flag(
        False,
        "Keep frozen models in host memory; each layer is copied to the device while the layer before it computes.",
    )
    tri_model: Literal["fused", "separate"] = own_flag(
        "fused", "Where frozen models run: in the policy's passes, or in passes of their own."
    )
    max_tokens_per_microbatch: int | None = own_flag(
        None, "The most tokens of a micro-batch; checked before the run starts."
    )
    exit_interval: int | None = megatron_flag(
        None,
        "Save and end after this number of iterations, or a multiple of it.",
        bound="at least 1",
    )
    exit_minutes: int | None = megatron_flag(
        None,
        "Save and end after the iteration in which the run gets older than this number of minutes.",
        "--exit-duration-in-mins",
        bound="at least 1",
    )
    grace_seconds: float = own_flag(
        60.0,
        "Seconds that the current iteration may take to finish after SIGTERM.",
        "--exit-grace-seconds",
        bound="finite and at least 0",
        remedy="write 0 to exit at once, or more",
    )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations of the policy on held-out prompts."""

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
    eval_command: str | None = own_flag(
        None,
        "A shell command that the sidecar runs in each evaluation, with the policy at OPENAI_BASE_URL; it writes its "
        "figures as a JSON object of numbers to the file EVAL_FIGURES.",
    )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """The output of a run for people."""

    log_interval: int = megatron_flag(1, "Iterations between printed lines.", bound="at least 1")
    progress: Literal["auto", "live", "lines", "none"] = own_flag(
        "auto", "A live display, or a line per iteration; `auto` selects the display on a terminal."
    )
    verbose: bool = own_flag(
        False,
        "Print automatic choices, defaults that are not Megatron's and other packages' warnings, which otherwise go to "
        "the run's folder alone.",
    )
    log_samples: int = own_flag(
        4,
        "Responses of each iteration that are written to samples.jsonl.",
        bound="at least 0",
        remedy="write 0 for none",
    )
    log_sample_tokens: bool = own_flag(
        False,
        "Write the tokens of these responses too, each with its log-prob of the engine and of the trainer: several "
        "times as much text.",
    )
    trace: Literal["on", "off"] = own_flag(
        "on", "Record the activities of each process over time, in the folder `trace` of the run's folder."
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
