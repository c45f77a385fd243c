"""Values that follow from flags, before settings are made: counts in samples, sizes implied by others, lengths.

Each function adds values to the given ones, names the flag that they follow from as their source, and notes the change.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.library import PREFERENCES, PRESETS
from megatron_rl.config.hardware import count_cores
from megatron_rl.flag_parser import Given
from megatron_rl.shared.device_memory import RankSplit, Recomputed, read_rank_memory
from megatron_rl.shared.protocol.probe import find_narrower
from megatron_rl.shared.weights import mapping
from megatron_rl.types import Architecture

if TYPE_CHECKING:
    from megatron_rl.command_line.pack_size import Size

# For accelerators alone.
_PACK_SIZE = "megatron_rl.command_line.pack_size"

# The defaults of --grpo-group-size and --micro-batch-size are those of `config`.
_ABSENT: Mapping[str, int] = {
    "transformer.tensor_model_parallel_size": 1,
    "transformer.pipeline_model_parallel_size": 1,
    "transformer.context_parallel_size": 1,
}
# A second engine is started for a model of _LEAST_PARAMETERS: with 40 M it saved a quarter of the time. It is started
# also for a run of _LEAST_TOKENS, which takes a tiny model some four minutes on two cores. There a second engine saved
# a fifth of the time, and takes 10 to 30 seconds to start. That is an estimate: no whole runs were compared.
_LEAST_PARAMETERS = 16_000_000
_LEAST_TOKENS = 1_000_000
_MOST_ENGINES = 4
# Values that say what is computed again in the backward pass, or that nothing is.
_RECOMPUTATION = (
    "transformer.recompute_granularity", "transformer.recompute_modules", "transformer.recompute_method",
    "transformer.recompute_num_layers", "transformer.moe_layer_recompute",
)  # fmt: skip
_TRAINED = {"bf16": "bfloat16", "fp16": "float16"}


class Derivation:
    """The given values, and those that are derived from them."""

    def __init__(self, given: dict[str, Given], defaults: Mapping[str, Any], note: Callable[[str], None]):
        self._given = given
        self._defaults = {**defaults, **_ABSENT}
        self._note = note
        self.problems: list[str] = []

    def settle_algorithm(self) -> None:
        """Add the values of the preset that --algorithm names, unless their flags are written."""
        name = self._given.get("algorithm.name")
        if name is None:
            return
        for field, value in PRESETS[name.value].settings.items():
            target = f"algorithm.{field}"
            if target not in self._given or self._given[target].is_implied:
                self._given[target] = Given(value, name.source, name.name)

    def settle_vocabulary(self, architecture: Architecture | None) -> None:
        """Turn --padded-vocab-size into the multiple that pads to it."""
        padded = self._given.get("described.padded_vocab_size")
        if padded is None:
            return
        ranks = self._look_up("transformer.tensor_model_parallel_size")
        if padded.value % ranks:
            self.problems.append(
                f"{padded.source} must be a multiple of --tensor-model-parallel-size {ranks}, which divides the "
                "vocabulary: write one that is"
            )
            return
        if architecture is not None and padded.value < architecture.vocab_size:
            self.problems.append(
                f"{padded.source} must be at least the vocabulary's {architecture.vocab_size} tokens: write more, or "
                "drop the flag"
            )
        target = "model.make_vocab_size_divisible_by"
        self._given[target] = Given(max(1, padded.value // ranks), padded.source, padded.name)

    def settle_group_size(self, world_size: int | None) -> None:
        """Choose a group size that divides an update over the replicas, if only the update's sequences are given."""
        whole, target = self._given.get("training.global_batch_size"), "algorithm.group_size"
        if whole is None or target in self._given or "algorithm.prompts_per_step" in self._given:
            return
        usual, micro_batch = self._look_up(target), self._look_up("training.micro_batch_size")
        replicas = self._count_replicas(world_size)
        if whole.value % (usual * replicas) == 0:
            return
        fitting = [
            size
            for size in range(2, usual)
            if whole.value % (size * replicas) == 0 and (size % micro_batch == 0 or micro_batch % size == 0)
        ]
        if fitting:
            size = max(fitting)
            self._given[target] = Given(size, f"{whole.source} over {replicas} replicas", whole.name)
            self._note(f"--grpo-group-size is {size}, not {usual}: {whole.source} has no more for {replicas} replicas")

    def count_samples(self) -> None:
        """Convert counts of responses, as in Megatron's scripts, into counts of iterations and updates."""
        of_update, of_iteration = self._look_up("training.global_batch_size"), self._count_responses()
        if of_iteration is None:
            return
        for name, target, flag, divisor in (
            ("samples.train", "training.train_iters", "--train-iters", of_iteration),
            ("samples.decay", "schedule.lr_decay_iters", "--lr-decay-iters", of_update or of_iteration),
            ("samples.warmup", "schedule.lr_warmup_iters", "--lr-warmup-iters", of_update or of_iteration),
        ):
            samples = self._given.get(name)
            if samples is None or (name == "samples.warmup" and samples.value == 0):
                continue
            if target in self._given:
                self._note(f"{self._given[target].source} overrules {samples.source}")
                continue
            # Megatron rounds down too.
            count = max(samples.value // divisor, 0 if name == "samples.warmup" else 1)
            self._given[target] = Given(count, samples.source, samples.name)
            self._note(f"{samples.source} makes {flag} {count}, of {divisor} responses each")

    def settle_lengths(self, architecture: Architecture | None) -> None:
        """Settle lengths that are not given: prompt and response each get half of the whole."""
        whole, response = self._given.get("training.seq_length"), self._given.get("sampling.max_tokens")
        prompt = self._given.get("data.max_prompt_tokens")
        if whole is None and response is not None:
            longest = architecture.max_position_embeddings if architecture is not None else 2 * response.value
            room = response.value if prompt is None else prompt.value
            length = min(longest, response.value + room)
            said = response.source if prompt is None else f"{response.source} and {prompt.source}"
            self._given["training.seq_length"] = Given(length, said, response.name)
            self._note(f"{said} {'makes' if prompt is None else 'make'} --seq-length {length}")
        elif whole is not None and response is None and prompt is None and whole.value > 1:
            half = whole.value // 2
            self._given["sampling.max_tokens"] = Given(half, f"half of {whole.source}", whole.name)
            self._note(f"--rollout-max-tokens is half of {whole.source}: {half}")

    def _look_up_longest(self) -> int | None:
        """Return the most tokens of a row; a pair has several sequences that --seq-length bounds each."""
        length: int | None = self._look_up("training.seq_length")
        if length is None or self._look_up("run.stage") != "dpo":
            return length
        return length * PREFERENCES[self._look_up("preference.loss")].num_responses

    def settle_micro_batch(self, world_size: int | None, is_shared: bool) -> None:
        """Make micro-batches as large as --max-tokens-per-gpu allows."""
        budget = self._given.get("training.max_tokens_per_gpu")
        if budget is None or "training.micro_batch_size" in self._given:
            return
        whole = self._look_up_longest()
        if whole is None:
            return
        prompt, response = self._settle_longest(whole)
        ranks = self._look_up("transformer.context_parallel_size")
        fitting = [
            size
            for size in self._list_micro_batches(world_size)
            if _count_tokens(size, self._look_up("algorithm.group_size"), prompt, response, is_shared)
            <= budget.value * ranks
        ]
        size = max(fitting, default=1)
        self._given["training.micro_batch_size"] = Given(size, budget.source, budget.name)
        self._note(f"{budget.source} makes --micro-batch-size {size}")
        if not fitting:
            self._note(
                f"{budget.source}: one response and its prompt may have {prompt + response} tokens, which is more"
            )

    def settle_pack(
        self, world_size: int | None, is_shared: bool, architecture: Architecture, device: int, cheap: tuple[str, ...]
    ) -> None:
        """Make micro-batches as large as a device of these bytes allows, unless a flag sets their size.

        `cheap` are the modules that are computed again if memory is short, unless a flag decides what is.
        """
        whole = self._look_up_longest()
        if whole is None or "training.max_tokens_per_gpu" in self._given:
            return
        group, replicas = self._look_up("algorithm.group_size"), self._count_replicas(world_size)
        given = self._given.get("training.micro_batch_size")
        rank = read_rank_memory(self._look_up, architecture, replicas)
        sizes = self._list_sizes(world_size, is_shared, rank.split, whole)
        if given is not None:
            sizes = [size for size in sizes if size.responses == given.value]
        elif not any(size.responses % group == 0 for size in sizes):
            # An update does not divide over the replicas, which a check reports.
            sizes = []
        if not sizes:
            return
        recomputed = None
        if cheap and self._given.keys().isdisjoint(_RECOMPUTATION):
            recomputed = dataclasses.replace(rank, recomputed=Recomputed(modules=frozenset(cheap)))
        pack_size = importlib.import_module(_PACK_SIZE)
        room = pack_size.count_room(device, rank, self._look_up, "service.endpoint" in self._given)
        most = pack_size.ENOUGH_TOKENS * self._look_up("transformer.context_parallel_size")
        pack = pack_size.choose_pack(sizes, group, most, rank.split.pipeline, rank, recomputed, room)
        source = f"devices of {device >> 30} GiB"
        if pack.recomputes:
            for field, value in zip(pack_size.RECOMPUTED, ("selective", cheap), strict=True):
                self._given[f"transformer.{field}"] = Given(value, source)
            self._note(pack_size.RECOMPUTATION)
        if given is None:
            self._given["training.micro_batch_size"] = Given(pack.size.responses, source)
            self._note(pack_size.describe_pack(pack, device, room, group, self._look_up("run.stage")))

    def settle_engines(self, num_ranks: int, architecture: Architecture | None) -> None:
        """Start an engine for each core if ranks occupy all cores: each core then has work while the ranks wait.

        A short run of a small model keeps one engine: the start of another takes longer than it saves.
        """
        num_cores = count_cores()
        is_said = not self._given.keys().isdisjoint(("rollout.num_engines", "service.endpoint"))
        if architecture is None or num_ranks < num_cores or is_said or self._look_up("rollout.engine") != "vllm":
            return
        num_parameters = sum(spec.num_elements for spec in mapping.Mapping(architecture).manifest())
        if num_parameters < _LEAST_PARAMETERS and self._count_tokens_sampled() < _LEAST_TOKENS:
            return
        count = min(_MOST_ENGINES, num_cores // self._look_up("rollout.tensor_parallel_size"))
        if count > 1:
            self._given["rollout.num_engines"] = Given(count, f"{num_ranks} ranks on {num_cores} cores")
            self._note(f"{num_ranks} ranks on {num_cores} cores make --rollout-num-engines {count}")

    def settle_precisions(self, architecture: Architecture | None, is_sampled: bool, is_cpu: bool) -> None:
        """Choose precisions that agree: engines compute in the trained precision, and can hold the published one.

        With --batch-invariant on a CPU nothing may be rounded on the way, so the published one is the trained one.
        """
        trained = next((dtype for field, dtype in _TRAINED.items() if self._look_up(f"transformer.{field}")), "float32")
        chosen = []
        if is_sampled and "rollout.dtype" not in self._given:
            self._given["rollout.dtype"] = Given(trained, "what is trained in")
            chosen.append(f"--rollout-dtype {trained}")
        rank = self._look_up("lora.rank")
        if (
            is_sampled
            and rank
            and self._look_up("publish.lora") == "adapter"
            and "rollout.lora_rank" not in self._given
        ):
            self._given["rollout.lora_rank"] = Given(rank, "--lora-rank, with --publish-lora adapter")
        if architecture is not None and "publish.dtype" not in self._given:
            source = f"the narrower of {trained}, which is trained in, and {architecture.dtype}, which is stored"
            published = find_narrower(trained, architecture.dtype)
            if is_sampled and is_cpu and self._look_up("rollout.is_batch_invariant"):
                source, published = "what is trained in, with --batch-invariant", trained
            self._given["publish.dtype"] = Given(published, source)
            chosen.append(f"--publish-dtype {published}")
        if architecture is not None and trained != architecture.dtype and chosen:
            self._note(f"training in {trained} and weights stored in {architecture.dtype} make {', '.join(chosen)}")

    def _list_sizes(self, world_size: int | None, is_shared: bool, split: RankSplit, whole: int) -> "list[Size]":
        """List the sizes of micro-batches that divide an update and, with virtual stages, fill the schedule."""
        prompt, response = self._settle_longest(whole)
        group = self._look_up("algorithm.group_size")
        num_responses = group * self._count_groups(self._count_replicas(world_size))
        make_size = importlib.import_module(_PACK_SIZE).Size
        sizes = [
            make_size(size, _count_tokens(size, group, prompt, response, is_shared), num_responses // size)
            for size in self._list_micro_batches(world_size)
        ]
        if split.num_virtual == 1:
            return sizes
        return [size for size in sizes if size.num_micro_batches % split.together == 0]

    def _settle_longest(self, whole: int) -> tuple[int, int]:
        """Return the most tokens of a prompt and of a response."""
        response = self._look_up("sampling.max_tokens")
        prompt = self._look_up("data.max_prompt_tokens") or whole - (response or 0)
        return prompt, response or whole - prompt

    def _count_tokens_sampled(self) -> int:
        """Count the most tokens that the run can sample; return 0 if its flags do not say."""
        of_response = self._look_up("sampling.max_tokens") or self._look_up("training.seq_length")
        return (self._look_up("training.train_iters") or 0) * (self._count_responses() or 0) * (of_response or 0)

    def _count_responses(self) -> int | None:
        """Count the responses of an iteration; return None if the flags do not say."""
        prompts = self._look_up("algorithm.prompts_per_step")
        if prompts is None:
            return self._look_up("training.global_batch_size")
        return prompts * self._look_up("algorithm.group_size")

    def _list_micro_batches(self, world_size: int | None) -> list[int]:
        """List the sizes that divide the groups of an update over the replicas."""
        group, groups = self._look_up("algorithm.group_size"), self._count_groups(self._count_replicas(world_size))
        parts = [size for size in range(1, group) if group % size == 0]
        return [*parts, *(count * group for count in range(1, groups + 1) if groups % count == 0)]

    def _count_groups(self, replicas: int) -> int:
        """Count the groups of an update in each replica; return 0 if the flags do not say, or if it has none."""
        group, prompts = self._look_up("algorithm.group_size"), self._look_up("algorithm.prompts_per_step")
        of_update = self._look_up("training.global_batch_size") or (None if prompts is None else prompts * group)
        return 0 if of_update is None else of_update // group // replicas

    def _count_replicas(self, world_size: int | None) -> int:
        model = 1
        for field in _ABSENT:
            model *= self._look_up(field)
        return max(1, (world_size or model) // model)

    def _look_up(self, target: str) -> Any:
        return self._given[target].value if target in self._given else self._defaults.get(target)


def _count_tokens(size: int, group: int, prompt: int, response: int, is_shared: bool) -> int:
    """Return the most tokens of a micro-batch of `size` responses."""
    prompts = max(1, size // group) if is_shared else size
    return prompts * prompt + size * response
