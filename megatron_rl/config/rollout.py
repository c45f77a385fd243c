"""The settings of the sidecar: engines, rewards, prompts, and the transport of weights. As in `trainer`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_rl.flag import megatron_flag, own_flag


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The sidecar: its engines, its address and its folder."""

    engine: Literal["vllm", "scripted"] = own_flag(
        "vllm",
        "The engines that sample responses; `scripted` ones have no model and give random tokens.",
        "--rollout-engine",
    )
    script: Path | None = own_flag(
        None,
        "The behavior of scripted engines: a JSON file of vocab_size, lengths, tokens_per_second, step_seconds, delay, "
        "delay_seed.",
        "--rollout-script",
    )
    num_engines: int = own_flag(
        1,
        "The number of engines to start on the sidecar's own host; 0 if only `--rollout-hosts` have engines.",
        "--rollout-num-engines",
        bound="at least 0",
    )
    hosts: str | None = own_flag(
        None,
        "Other hosts with engines, each with an agent. `static:FILE`: the hosts of a TOML file. `slurm`, `kubernetes`: "
        "the hosts that `megatron-rl launch` has started. `ray:FILE`: hosts that FILE asks of a Ray cluster.",
        "--rollout-hosts",
    )
    tensor_parallel_size: int = own_flag(
        1, "Devices that an engine is divided over.", "--rollout-tensor-parallel-size", bound="at least 1"
    )
    devices: list[int] | None = own_flag(
        None,
        "The engines' accelerators, in order, counted among the visible ones; if not given, those after the ranks' "
        "accelerators.",
        "--rollout-devices",
    )
    colocate: Literal["off", "share", "sleep"] = own_flag(
        "off",
        "Have engines and ranks use the same accelerators. `share`, which the flag alone means: at the same time, the "
        "memory divided. `sleep`: by turns; the ranks' state is on the host while engines sample, and engines sleep "
        "while ranks train.",
        "--rollout-colocate",
        alone="share",
    )
    start_minutes: float = own_flag(
        10.0, "Minutes that engines may take to start.", "--rollout-start-minutes", bound="a finite duration above 0"
    )
    # A host that starts again with its system and an engine takes less: engines have `start_minutes`.
    lost_minutes: float = own_flag(
        15.0,
        "Minutes that an iteration waits for engines to return while none is left, before it fails.",
        "--rollout-lost-minutes",
        bound="a finite duration above 0",
    )
    is_batch_invariant: bool = own_flag(
        False,
        "Have engines and trainer compute each token's log-prob to the same bits, whatever else is in the batch.",
        "--batch-invariant",
    )
    num_threads: int | None = own_flag(
        None,
        "Threads of each process of an engine on a CPU; a share of the host's cores if not given.",
        "--rollout-num-threads",
        bound="at least 1",
    )
    python: Path | None = own_flag(
        None, "The Python of the environment that has vLLM; this environment's if not given.", "--rollout-python"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = own_flag(
        None,
        "The precision that engines compute in. If not given, the precision of training; for a sidecar that is "
        "started alone, the precision of the stored weights.",
        "--rollout-dtype",
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
    max_in_flight: int | Literal["auto"] = own_flag(
        "auto",
        "Responses that an engine is given at once. `auto` chooses the number with which an iteration is predicted to "
        "end first, at most twice `--rollout-max-num-seqs`.",
        "--rollout-max-in-flight",
        bound="at least 1",
    )
    vllm_args: str = own_flag(
        "",
        "Further flags of vLLM's server, for every engine, as one text: `--rollout-vllm-args='--kv-cache-dtype fp8'`.",
        "--rollout-vllm-args",
    )
    tool_parser: str | None = own_flag(
        None,
        "vLLM's parser of the calls of tools that the policy writes, by vLLM's name; without it all it writes is text.",
        "--rollout-tool-parser",
    )
    reasoning_parser: str | None = own_flag(
        None,
        "vLLM's parser of the thoughts that the policy writes before its answer, by vLLM's name.",
        "--rollout-reasoning-parser",
    )
    scoring: Literal["ours", "vllm"] = own_flag(
        "ours",
        "On GPUs, the kernel that computes the log-probs of sampled tokens: one that reads the logits once, or vLLM's.",
        "--rollout-scoring",
    )
    speculative: str | None = own_flag(
        None,
        "Have engines draft tokens and check several in one step. `ngram`: drafts follow an earlier place in the "
        "response or its prompt with the same last tokens. `suffix`: in other responses too. `draft:DIR`: a smaller "
        "model drafts. `eagle3:DIR`: a head on the policy's hidden states does. `mtp`: the checkpoint's own prediction "
        "layers do.",
        "--rollout-speculative",
    )
    speculative_tokens: int | None = own_flag(
        None,
        "With `--rollout-speculative`, the tokens of a draft; if not given 4, with `mtp` 1, with `suffix` at most 24.",
        "--rollout-speculative-tokens",
        bound="at least 1",
    )
    replay_routing: bool = own_flag(
        False,
        "Have engines give the experts that they chose for each token, and train with these in place of the routers' "
        "own choice.",
        "--rollout-replay-routing",
    )
    lora_rank: int = own_flag(
        0,
        "The largest rank of adapters that engines accept; with `--publish-lora adapter`, `--lora-rank` if not given.",
        "--rollout-lora-rank",
        bound="at least 0",
    )
    transport: Literal["shm", "nccl", "hccl"] = own_flag(
        "shm",
        "The transport of weights to the engines: files that they share with the trainer, or from device to device. "
        "nccl reaches engines on other hosts too.",
        "--rollout-transport",
    )
    teacher_devices: list[int] | None = own_flag(
        None,
        "The accelerators of `--teacher NAME=engines:FOLDER`, as many for each, counted among the visible ones; none "
        "on a CPU.",
        "--teacher-devices",
    )
    folder: Path | None = own_flag(
        None, "The run's folder: token, address, journal, audit log and the engines' logs.", "--rollout-folder"
    )
    listen: str = own_flag(
        "127.0.0.1:0",
        "The address that the sidecar listens at, HOST:PORT or [HOST]:PORT; port 0 is a free port, 0.0.0.0 and [::] "
        "are all addresses.",
        "--rollout-listen",
    )
    retain_journals: int = own_flag(
        2, "The number of iterations whose groups the journal keeps.", "--rollout-retain-journals", bound="at least 1"
    )
    lease_seconds: float = own_flag(
        60.0,
        "Seconds that the sidecar stays reserved for a silent trainer.",
        "--rollout-lease-seconds",
        bound="a finite duration above 0",
    )

    @property
    def is_colocated(self) -> bool:
        return self.colocate != "off"

    @property
    def takes_turns(self) -> bool:
        """Whether engines sleep while ranks compute, and ranks are off their devices while engines sample."""
        return self.colocate == "sleep"


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Reward functions, and the processes that run them."""

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
    model_device: str = own_flag(
        "cpu", "The device of the classifiers of `--reward model:`, such as cuda:1.", "--reward-model-device"
    )
    judge_prompt: Path | None = own_flag(
        None,
        "The file of the question to `--reward judge:FOLDER`, with {prompt}, {response} and columns of the row.",
        "--judge-prompt",
    )
    judge_pattern: str = own_flag(
        r"[Ss]core:\s*(-?\d+(?:\.\d+)?)",
        "The regular expression whose only group is the score in the judge's answer; its last match counts.",
        "--judge-pattern",
    )
    judge_default: float = own_flag(
        0.0, "The score of an answer that is cut, or that no score can be read from.", "--judge-default"
    )
    judge_max_tokens: int = own_flag(
        1024, "The most tokens of a judge's answer.", "--judge-max-tokens", bound="at least 1"
    )
    judge_max_num_seqs: int = own_flag(
        1,
        "Answers that the judge writes at once; above 1, the others can decide a near tie between two tokens.",
        "--judge-max-num-seqs",
        bound="at least 1",
    )
    judge_devices: list[int] | None = own_flag(
        None, "The judge's accelerators, counted among the visible ones; none on a CPU.", "--judge-devices"
    )
    judge_vllm_args: str = own_flag(
        "", "Further flags of vLLM's server for the judge, such as its share of memory.", "--judge-vllm-args"
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The prompts or demonstrations that are trained on."""

    prompts: list[Path] | None = own_flag(
        None, "Files of prompts, JSONL or Parquet; with FILE=WEIGHT each has its share of the prompts."
    )
    eval_prompts: list[Path] | None = own_flag(None, "Files of prompts that are only evaluated.")
    held_out: int = own_flag(
        0, "The number of prompts of `--prompts` that are held out for evaluation, drawn by seed.", "--prompts-held-out"
    )
    prompt_key: str = own_flag("prompt", "The column with the prompt: text, or a list of chat messages.")
    completion_key: str = own_flag(
        "completion", "With `--stage sft`, the column with the text after the prompt, or a list of chat messages."
    )
    messages_key: str = own_flag(
        "messages", "With `--stage sft`, the column with a whole chat; the assistant's messages are trained on."
    )
    chosen_key: str = own_flag(
        "chosen",
        "With `--stage dpo`, the column with the preferred response: text, or a list of chat messages, of which the "
        "prompt may be the first where a row has no column with the prompt.",
    )
    rejected_key: str = own_flag(
        "rejected", "With `--stage dpo`, the column with the other response, in the same form."
    )
    answer_key: str = own_flag(
        "answer", "The column that reward functions are given as `answer`; other columns keep their names."
    )
    chat: bool = own_flag(
        False, "Turn a plain-text prompt into a user's message of the chat template.", "--prompt-chat"
    )
    system_message: str | None = own_flag(None, "The system message before every chat.", "--prompt-system-message")
    max_prompt_tokens: int | None = own_flag(
        None,
        "Leave out longer prompts and count them; without the flag, a prompt without room for a response is an error.",
    )
    shuffle: bool = own_flag(True, "Use prompts in the order of the files, without shuffling.", "--no-shuffle-prompts")
    rest_below: float | None = own_flag(
        None, "Leave prompts out for a while if their group had a lower mean reward than this.", "--prompts-rest-below"
    )
    rest_above: float | None = own_flag(
        None, "Leave prompts out for a while if their group had a higher mean reward than this.", "--prompts-rest-above"
    )
    rest_epochs: int = own_flag(
        1, "The number of epochs that such a prompt is left out of.", "--prompts-rest-epochs", bound="at least 1"
    )


ROW_FORMATS = (".jsonl", ".parquet")
"""The suffixes of files with rows."""


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of `--prompts`, and its weight: a number after `=`."""

    path: Path
    weight: float | None = None


def read_weights(paths: Sequence[Path]) -> list[SourceFile]:
    """Divide FILE=WEIGHT into file and weight; a file that exists under the whole name has none."""
    found = []
    for path in paths:
        file, _, number = str(path).rpartition("=")
        try:
            weight = float(number) if file and not path.exists() else None
        except ValueError:
            weight = None
        found.append(SourceFile(path) if weight is None else SourceFile(Path(file), weight))
    return found


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Sampling of responses for training."""

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
        None, "Tokens that end a response, besides the model's own and the chat template's.", "--rollout-stop-tokens"
    )
    ignore_eos: bool = own_flag(
        False, "Keep sampling after the tokens that end a text or a turn.", "--rollout-ignore-eos"
    )
    tail: Literal["stop", "truncate", "carry"] = own_flag(
        "stop",
        "The treatment of an iteration's last groups: `stop` waits for them until `--rollout-deadline-minutes`, "
        "`truncate` ends their responses where they are, `carry` puts their prompts off until these fill an iteration "
        "of their own.",
        "--rollout-tail",
    )
    tail_groups: int | None = own_flag(
        None,
        "With `--rollout-tail`, the number of last groups; an eighth of `--grpo-prompts-per-step` if not given.",
        "--rollout-tail-groups",
        bound="at least 1",
    )


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """The trainer's connection to its sidecar."""

    endpoint: str | None = own_flag(
        None,
        "The address of a running sidecar, `http://HOST:PORT`; without it rank 0 starts one and ends it.",
        "--rollout-endpoint",
    )
    token_file: Path | None = own_flag(None, "The file with the token of `--rollout-endpoint`.", "--rollout-token-file")
    deadline_minutes: float = own_flag(
        60.0,
        "Minutes that the groups of an iteration may take before the iteration fails.",
        "--rollout-deadline-minutes",
        bound="a finite duration above 0",
    )
    patience_seconds: float = own_flag(
        60.0,
        "Seconds that the sidecar may be out of reach before the run ends with an error.",
        "--rollout-patience-seconds",
        bound="a finite duration above 0",
    )


@dataclasses.dataclass(frozen=True)
class PublishConfig:
    """The publication of weights to the engines."""

    folder: Path | None = own_flag(
        None, "The folder that trainer and engines share; this user's in /dev/shm if not given.", "--publish-folder"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = own_flag(
        None,
        "The precision that weights are published and exported in. If not given, the narrower one of training and the "
        "stored weights, and with `--batch-invariant` on a CPU the precision of training.",
        "--publish-dtype",
    )
    proof: Literal["digests", "probe"] = own_flag(
        "digests",
        "The proof that engines hold a version: `digests` of all their parameters, bit for bit, or, where these cannot "
        "be compared, the log-probs of the `probe`, which show only coarse differences.",
        "--publish-proof",
    )
    lora: Literal["merged", "adapter"] = own_flag(
        "merged",
        "The form in which engines get a policy with `--lora-rank`: weights with adapters `merged` into them, or each "
        "version's `adapter` alone, while the engines hold the base.",
        "--publish-lora",
    )
    # No GPU has run the other way.
    through: Literal["auto", "files", "ipc"] = own_flag(
        "files",
        "The way in which engines get weights with --rollout-transport shm: `files`, or `ipc`, from the memory of the "
        "trainer's GPUs on the same host; `auto` uses files where that is not possible.",
        "--publish-through",
    )
    deadline_minutes: float = own_flag(
        10.0, "Minutes that a publish may take.", "--publish-deadline-minutes", bound="a finite duration above 0"
    )
    lost_host: Literal["leave", "wait"] = own_flag(
        "leave",
        "The treatment of a host of engines that does not receive a version in time: `leave` it out until the next "
        "publish, or `wait` until the publish fails.",
        "--publish-lost-host",
    )
    host_minutes: float = own_flag(
        2.0,
        "Minutes that a host may take to receive a version before it is left out.",
        "--publish-host-minutes",
        bound="a finite duration above 0",
    )
    num_streams: int = own_flag(
        4,
        "Connections over which a rank sends weights to a host of engines.",
        "--publish-streams",
        bound="at least 1",
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

    @property
    def is_base_proved(self) -> bool:
        """Whether versions are adapters alone, on a base that each engine proves bit for bit when it has started."""
        return self.lora == "adapter" and self.proof == "digests"
