"""Configuration of the loop: prompts, sampling, what is maximized, and what a person sees. See `config.py`."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from megatron_rl.config.flag import Option


class Subject:
    """Values that belong together. They may be anything; what is wrong with them is said by `problems`."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values for themselves, whatever the other subjects say."""
        return iter(())


def duration_problems(flag: str, value: float) -> Iterator[str]:
    """What is wrong with a time to wait."""
    if not 0 < value < math.inf:
        yield f"{flag} {value:g} must be a finite duration above 0: write one that is"


def bound_problems(flag: str, value: float | None) -> Iterator[str]:
    """What is wrong with the bound of a difference."""
    if value is not None and not value > 0:
        yield f"{flag} {value:g} must be above 0: write a mean difference of log-probs, or inf for no bound"


@dataclasses.dataclass(frozen=True)
class DataConfig(Subject):
    """Which prompts are trained on."""

    prompts: Annotated[
        list[Path] | None, Option("Files of prompts, JSONL or Parquet.", names=("--prompts",), megatron=False)
    ] = None
    eval_prompts: Annotated[
        list[Path] | None,
        Option("Files of prompts that are only evaluated.", names=("--eval-prompts",), megatron=False),
    ] = None
    held_out: Annotated[
        int,
        Option(
            "Prompts of `--prompts` that are held out for evaluation, drawn by seed.",
            names=("--prompts-held-out",),
            megatron=False,
        ),
    ] = 0
    prompt_key: Annotated[
        str,
        Option(
            "The column with the prompt: text, or a list of chat messages.", names=("--prompt-key",), megatron=False
        ),
    ] = "prompt"
    answer_key: Annotated[
        str,
        Option(
            "The column that rewards know as `answer`; all others reach them under their names.",
            names=("--answer-key",),
            megatron=False,
        ),
    ] = "answer"
    chat: Annotated[
        bool,
        Option("Turn plain text into a user's message of the chat template.", names=("--prompt-chat",), megatron=False),
    ] = False
    system_message: Annotated[
        str | None,
        Option("The system's message before every chat.", names=("--prompt-system-message",), megatron=False),
    ] = None
    max_prompt_tokens: Annotated[
        int | None,
        Option(
            "Longer prompts are left out, and counted; without it one that leaves no room for a response is an error.",
            names=("--max-prompt-tokens",),
            megatron=False,
        ),
    ] = None
    shuffle: Annotated[
        bool, Option("Take prompts in the order of the files.", names=("--no-shuffle-prompts",), megatron=False)
    ] = True


@dataclasses.dataclass(frozen=True)
class SamplingConfig(Subject):
    """How responses are sampled for training."""

    max_tokens: Annotated[
        int | None,
        Option(
            "The most tokens of a response; what `--seq-length` leaves to the longest prompt if not given.",
            names=("--rollout-max-tokens",),
            megatron=False,
        ),
    ] = None
    temperature: Annotated[
        float,
        Option(
            "The temperature of sampling; the trainer's log-probs are of logits divided by it.",
            names=("--rollout-temperature", "--rl-default-temperature"),
        ),
    ] = 1.0
    stop_token_ids: Annotated[
        list[int] | None,
        Option("Tokens that end a response, beside the model's own.", names=("--rollout-stop-tokens",), megatron=False),
    ] = None
    ignore_eos: Annotated[
        bool, Option("Sample on past the end of text.", names=("--rollout-ignore-eos",), megatron=False)
    ] = False


@dataclasses.dataclass(frozen=True)
class ServiceConfig(Subject):
    """How the trainer reaches its sidecar."""

    endpoint: Annotated[
        str | None,
        Option(
            "The address of a sidecar that runs, `http://HOST:PORT`; without it rank 0 starts one, and ends it.",
            names=("--rollout-endpoint",),
            megatron=False,
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        Option("The file with the token of `--rollout-endpoint`.", names=("--rollout-token-file",), megatron=False),
    ] = None
    start_minutes: Annotated[
        float, Option("How long engines may take to start.", names=("--rollout-start-minutes",), megatron=False)
    ] = 10.0
    deadline_minutes: Annotated[
        float,
        Option(
            "How long an iteration's groups may take; after that it fails by name.",
            names=("--rollout-deadline-minutes",),
            megatron=False,
        ),
    ] = 60.0
    patience_seconds: Annotated[
        float,
        Option(
            "How long a sidecar may stay away before that is an error.",
            names=("--rollout-patience-seconds",),
            megatron=False,
        ),
    ] = 60.0

    def problems(self) -> Iterator[str]:
        yield from duration_problems("--rollout-start-minutes", self.start_minutes)
        yield from duration_problems("--rollout-deadline-minutes", self.deadline_minutes)
        yield from duration_problems("--rollout-patience-seconds", self.patience_seconds)


@dataclasses.dataclass(frozen=True)
class PublishConfig(Subject):
    """How weights reach the engines."""

    folder: Annotated[
        Path | None,
        Option(
            "The folder that trainer and engines share; one of this user in /dev/shm if not given.",
            names=("--publish-folder",),
            megatron=False,
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(
            "The precision that weights are published in; that of the stored weights if not given.",
            names=("--publish-dtype",),
            megatron=False,
        ),
    ] = None
    deadline_minutes: Annotated[
        float, Option("How long a publish may take.", names=("--publish-deadline-minutes",), megatron=False)
    ] = 10.0
    probe_bound: Annotated[
        float | None,
        Option(
            "The mean difference of an engine's and the trainer's log-probs of a version's probe, beyond which the "
            "publish fails; by precision and device if not given, `inf` for none.",
            names=("--publish-probe-bound",),
            megatron=False,
        ),
    ] = None

    def problems(self) -> Iterator[str]:
        yield from duration_problems("--publish-deadline-minutes", self.deadline_minutes)
        yield from bound_problems("--publish-probe-bound", self.probe_bound)


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig(Subject):
    """Group-relative policy optimization: what is maximized, and how far an update may go."""

    group_size: Annotated[int, Option("Responses to a prompt.", names=("--grpo-group-size",))] = 8
    prompts_per_step: Annotated[
        int | None,
        Option(
            "Prompts in an iteration; those of one update of `--global-batch-size` if not given.",
            names=("--grpo-prompts-per-step",),
        ),
    ] = None
    clamp_eps_lower: Annotated[float, Option("How far below 1 a ratio counts.", names=("--grpo-clamp-eps-lower",))] = (
        0.2
    )
    clamp_eps_upper: Annotated[float, Option("How far above 1 a ratio counts.", names=("--grpo-clamp-eps-upper",))] = (
        0.2
    )
    kl_beta: Annotated[float, Option("The weight of the divergence from the reference.", names=("--grpo-kl-beta",))] = (
        0.0
    )
    ref_model: Annotated[
        Path | None,
        Option(
            "The Hugging Face folder of the reference; the weights that the run starts from if not given.",
            names=("--grpo-ref-model",),
            megatron=False,
        ),
    ] = None
    ref_interval: Annotated[
        int | None,
        Option(
            "Iterations after which the reference takes the policy's weights, again and again; never if not given.",
            names=("--grpo-ref-interval",),
            megatron=False,
        ),
    ] = None
    advantage: Annotated[
        Literal["grpo", "mean", "rloo"],
        Option(
            "Rewards less their mean: over their deviation (grpo), as they are (mean), or less the mean of the others.",
            names=("--grpo-advantage",),
            megatron=False,
        ),
    ] = "grpo"
    aggregation: Annotated[
        Literal["token", "sequence", "constant"],
        Option(
            "The mean over an update: of its tokens, of its responses' means, or of its responses' sums by the most "
            "tokens that one may have.",
            names=("--grpo-aggregation",),
            megatron=False,
        ),
    ] = "token"
    is_correction: Annotated[
        bool,
        Option(
            "Weigh each token by the trainer's probability over the engine's.",
            names=("--rl-inference-logprobs-is-correction",),
        ),
    ] = False
    is_truncation: Annotated[
        float | None,
        Option("The largest such weight.", names=("--rl-importance-sampling-truncation-coef",)),
    ] = None

    def problems(self) -> Iterator[str]:
        if not 0 <= self.clamp_eps_lower <= 1:
            yield (
                f"--grpo-clamp-eps-lower {self.clamp_eps_lower:g} is not between 0 and 1: write how far below 1 a "
                "ratio counts"
            )
        if not self.clamp_eps_upper >= 0:
            yield (f"--grpo-clamp-eps-upper {self.clamp_eps_upper:g} is below 0: write how far above 1 a ratio counts")
        if not 0 <= self.kl_beta < math.inf:
            yield (f"--grpo-kl-beta {self.kl_beta:g} weighs a divergence that is to become smaller: write 0 or more")
        if self.is_truncation is None:
            return
        flag = f"--rl-importance-sampling-truncation-coef {self.is_truncation:g}"
        if not self.is_truncation > 0:
            yield f"{flag} would weigh tokens with nothing or turn them round: write more than 0"
        if not self.is_correction:
            yield (
                f"{flag} bounds weights that there are with --rl-inference-logprobs-is-correction only: add it, or "
                "drop the flag"
            )


@dataclasses.dataclass(frozen=True)
class LoopConfig(Subject):
    """How generation and training share an iteration."""

    schedule: Annotated[
        Literal["periodic", "sync"],
        Option("Train groups as they finish, or once all of them have.", names=("--schedule",), megatron=False),
    ] = "periodic"
    consume_order: Annotated[
        Literal["completion", "prompt"],
        Option(
            "Bind micro-batches to groups as they finish, or to prompts: the same update whatever the order.",
            names=("--consume-order",),
            megatron=False,
        ),
    ] = "completion"
    frozen_offload: Annotated[
        bool,
        Option(
            "Keep frozen models in the host's memory; their layers come to the device one before they compute.",
            names=("--frozen-offload",),
            megatron=False,
        ),
    ] = False
    tri_model: Annotated[
        Literal["fused", "separate"],
        Option(
            "How the frozen models run: in the policy's passes, or in passes of their own.",
            names=("--tri-model",),
            megatron=False,
        ),
    ] = "fused"
    max_tokens_per_microbatch: Annotated[
        int | None,
        Option(
            "The most tokens that a micro-batch may ever have; checked before the run starts.",
            names=("--max-tokens-per-microbatch",),
            megatron=False,
        ),
    ] = None
    grace_seconds: Annotated[
        float,
        Option(
            "How long the iteration that runs may take to end after SIGTERM.",
            names=("--exit-grace-seconds",),
            megatron=False,
        ),
    ] = 60.0

    def problems(self) -> Iterator[str]:
        if not 0 <= self.grace_seconds < math.inf:
            yield (
                f"--exit-grace-seconds {self.grace_seconds:g} is below 0, or never over: write 0 to end at once, "
                "or more"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Subject):
    """How the policy is evaluated on held-out prompts."""

    interval: Annotated[
        int | None, Option("Iterations from one evaluation to the next.", names=("--eval-interval",))
    ] = None
    num_prompts: Annotated[
        int | None,
        Option("The most prompts of an evaluation.", names=("--eval-num-prompts",), megatron=False),
    ] = None
    num_samples: Annotated[
        int, Option("Responses to each: the k of pass@k.", names=("--eval-num-samples",), megatron=False)
    ] = 1
    temperature: Annotated[
        float, Option("0 takes the likeliest token.", names=("--eval-temperature",), megatron=False)
    ] = 0.0
    pass_reward: Annotated[
        float, Option("The reward from which on a response passes.", names=("--eval-pass-reward",), megatron=False)
    ] = 1.0


@dataclasses.dataclass(frozen=True)
class ObserveConfig(Subject):
    """What a person sees of a run."""

    log_interval: Annotated[int, Option("Iterations from one printed line to the next.")] = 1
    progress: Annotated[
        Literal["auto", "live", "lines", "none"],
        Option("A live display, or a line an iteration; auto asks whether there is a terminal.", megatron=False),
    ] = "auto"
    verbose: Annotated[
        bool,
        Option(
            "Print what was chosen automatically and what other packages warn of, which is in the run's folder else.",
            names=("--verbose",),
            megatron=False,
        ),
    ] = False
    log_samples: Annotated[
        int,
        Option("Responses of an iteration that are written down.", names=("--log-samples",), megatron=False),
    ] = 4
    mismatch_warning: Annotated[
        float | None,
        Option(
            "The mean difference of engine's and trainer's log-probs that is warned of; by precision if not given.",
            names=("--rollout-mismatch-warning",),
            megatron=False,
        ),
    ] = None
    mismatch_error: Annotated[
        float | None,
        Option(
            "The mean difference beyond which an iteration ends the run before its update; five times that of the "
            "warning, as far as the engines' precision sets it, if not given, `inf` for none.",
            names=("--rollout-mismatch-error",),
            megatron=False,
        ),
    ] = None
    tensorboard_dir: Annotated[Path | None, Option("The folder of TensorBoard's event files.")] = None
    wandb_project: Annotated[str, Option("The project in Weights & Biases; none if empty.")] = ""
    wandb_exp_name: Annotated[str, Option("The name of the run there.")] = ""
    wandb_save_dir: Annotated[str, Option("The folder of its local files.")] = ""
    wandb_entity: Annotated[str, Option("Whose project it is.")] = ""

    def problems(self) -> Iterator[str]:
        yield from bound_problems("--rollout-mismatch-error", self.mismatch_error)
        if self.log_interval < 1:
            yield f"--log-interval {self.log_interval} is below 1: write 1 or more"
        if self.log_samples < 0:
            yield f"--log-samples {self.log_samples} is below 0: write 0 for none"
