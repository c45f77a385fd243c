"""Low-rank adapters under PEFT's names: the modules that have one, and a rank's part of each.

A linear module with the weight W [O, I] computes with W + scale B A, where A is [K, I] and B is [O, K]. W is frozen. A
Megatron parameter may consist of several modules, as queries, keys and values do, and each has an adapter of its own.
A rank that has rows of W has the same rows of B and all of A. One that has columns has these of A and all of B.

Letters: O outputs, I inputs, K the adapter's rank.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.weights import mapping
from megatron_rl.shared.weights.families.names import Split
from megatron_rl.shared.weights.mapping import Coordinates, Piece, ShardMap, TensorSpec

# The modules that have adapters if none are named, by the ends of their names in families.
_USUAL = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3",
)  # fmt: skip
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of PEFT with which an adapter computes something else, each with the value that changes nothing.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA", "bias": "none", "lora_dropout": 0, "fan_in_fan_out": False, "use_rslora": False,
    "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "target_parameters": None,
    "layer_replication": None, "lora_bias": False, "megatron_config": None, "trainable_token_indices": None,
}  # fmt: skip
# Ways to draw the first adapters that leave the base as it is. PEFT's others write another base when they are loaded.
_DRAWN = (True, False, None, "gaussian", "eva", "orthogonal")
# Further settings of PEFT that change nothing of what an adapter computes.
_WITHOUT_EFFECT = frozenset(
    ("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode", "r",
     "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
     "corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_core", "qalora_group_size",
     "runtime_config", "ensure_weight_tying"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AdapterPart:
    """A rank's part of one module's adapter."""

    module: str
    """The module's name in the Hugging Face model."""
    a: ShardMap
    b: ShardMap
    rows: tuple[int, ...]
    """The rows of the rank's parameter that the rows of its part of B belong to."""
    splits_inputs: bool
    """True if ranks divide A, and False if they divide B."""
    is_expert: bool


def name_factors(module: str) -> tuple[str, str]:
    """Return PEFT's names of a module's A and B."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


class AdapterMapping:
    """The adapters of one architecture, with the same rank in every module."""

    def __init__(self, weights: mapping.Mapping, rank: int, targets: Sequence[str] | None = None):
        """Give an adapter to each linear module whose name ends with one of `targets`; by default, of the usual ones.

        Raise an InputError for a module that cannot have one yet.
        """
        self.rank = rank
        self._weights = weights
        self._shapes = {spec.name: spec.shape for spec in weights.manifest()}
        linear = [(module, module.rpartition(".")[2], is_expert) for module, is_expert in weights.linear_modules()]
        endings = list(dict.fromkeys(ending for _, ending, _ in linear))
        self.targets = tuple(targets or (ending for ending in endings if ending in _USUAL))
        self._modules: set[str] = set()
        for module, ending, is_expert in linear:
            if ending in self.targets:
                if is_expert and weights.stacks_experts:
                    raise InputError(
                        f"--lora-targets: {module} is stored with all experts of its layer in one tensor, for which "
                        f"PEFT has no module: name other modules"
                    )
                self._modules.add(module)
        if missing := [target for target in self.targets if target not in endings]:
            raise InputError(
                f"--lora-targets {missing[0]}: {weights.architecture.family} models have no linear module of that "
                f"name that can have an adapter; write some of {', '.join(endings)}"
            )

    def manifest(self, dtype: str) -> list[TensorSpec]:
        """List the tensors of all adapters, in the order of the layers."""
        specs = []
        for weight, shape in self._shapes.items():
            module = weight.removesuffix(".weight")
            if module not in self._modules:
                continue
            (num_outputs, num_inputs), (name_a, name_b) = shape, name_factors(module)
            specs.append(TensorSpec(name_a, (self.rank, num_inputs), dtype))
            specs.append(TensorSpec(name_b, (num_outputs, self.rank), dtype))
        return specs

    def place(self, parameter: str, coordinates: Coordinates, padded_vocab_size: int) -> list[AdapterPart]:
        """Return a rank's parts of the adapters of a Megatron parameter's modules, in the modules' order."""
        split, is_expert, weights = self._weights.describe(parameter)
        modules = [weight.removesuffix(".weight") for weight in weights]
        if split is Split.WHOLE or not self._modules.intersection(modules):
            return []
        weight_map = self._weights.shard(parameter, coordinates, padded_vocab_size)
        tensor_rank = coordinates.expert_tensor_rank if is_expert else coordinates.tensor_rank
        return [
            self._place(weight, weight_map, tensor_rank, is_expert)
            for weight, module in zip(weights, modules, strict=True)
            if module in self._modules
        ]

    def _place(self, weight: str, weight_map: ShardMap, tensor_rank: int, is_expert: bool) -> AdapterPart:
        pieces = sorted((piece for piece in weight_map.pieces if piece.name == weight), key=lambda one: one.source)
        module = weight.removesuffix(".weight")
        name_a, name_b = name_factors(module)
        start, length = pieces[0].source, sum(piece.length for piece in pieces)
        assert all(one.source + one.length == after.source for one, after in itertools.pairwise(pieces))
        (num_outputs, num_inputs), splits_inputs = self._shapes[weight], pieces[0].dim == 1
        is_owned, is_first = weight_map.owned, weight_map.owned and tensor_rank == 0
        if splits_inputs:
            a = ShardMap((self.rank, length), (Piece(name_a, 1, start, 0, length),), is_owned)
            b = ShardMap((num_outputs, self.rank), (Piece(name_b, 0, 0, 0, num_outputs),), is_first)
            rows = tuple(range(num_outputs))
        else:
            a = ShardMap((self.rank, num_inputs), (Piece(name_a, 0, 0, 0, self.rank),), is_first)
            b = ShardMap((length, self.rank), (Piece(name_b, 0, start, 0, length),), is_owned)
            rows = tuple(row for piece in pieces for row in range(piece.target, piece.target + piece.length))
        return AdapterPart(module, a, b, rows, splits_inputs, is_expert)


def describe_for_peft(adapters: AdapterMapping, alpha: float, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of adapters of the model in the folder `base`."""
    return {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "target_modules": list(adapters.targets),
        "inference_mode": True,
        "init_lora_weights": True,
        **_PLAIN,
    }


def check_config(folder: Path, rank: int, alpha: float) -> None:
    """Read a folder's adapter_config.json; raise unless its adapters compute what this rank and alpha say."""
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--load-lora {folder}: {path} cannot be read ({error}): name a folder of PEFT's") from None
    if joined := config.get("target_parameters"):
        raise InputError(
            f"{path} has adapters of tensors that hold all experts of a layer ({', '.join(joined)}), and here each "
            f"expert has its own: have PEFT merge them (merge_and_unload), and write --hf-model with that folder"
        )
    for name, plain in _PLAIN.items():
        value = config.get(name, plain)
        if value != plain and (value or plain):
            raise InputError(
                f"{path} has {name} {json.dumps(value)}, and adapters here have {json.dumps(plain)}: use plain LoRA"
            )
    drawn = config.get("init_lora_weights", True)
    if (drawn.lower() if isinstance(drawn, str) else drawn) not in _DRAWN:
        raise InputError(
            f"{path} has init_lora_weights {json.dumps(drawn)}, with which PEFT loads another base: have PEFT save it "
            "for the plain base (path_initial_model_for_weight_conversion)"
        )
    for name in sorted(name for name in config.keys() - _PLAIN.keys() - _WITHOUT_EFFECT if config[name]):
        raise InputError(f"{path} has {name}, with which adapters may compute something else: use plain LoRA")
    for flag, name, own in (("--lora-rank", "r", rank), ("--lora-alpha", "lora_alpha", alpha)):
        if config.get(name) != own:
            raise InputError(f"{path} has {name} {config.get(name)}, and {flag} is {own:g}: write {config.get(name)}")
