"""The experts of a config.json, read and written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families.values import read_boolean, read_count, read_positive
from megatron_rl.types import Architecture, Experts

_TYPES = {field.name: field.type for field in dataclasses.fields(Experts)}


@dataclasses.dataclass(frozen=True)
class ExpertKeys:
    """The keys of config.json that describe a family's experts."""

    num_experts: tuple[str, ...]
    ffn_hidden_size: str
    num_active: str = "num_experts_per_tok"
    normalize_weights: str | None = None
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other fields of Experts, each with its key."""
    num_shared: str | None = None
    """The key of the shared expert's width, counted in experts; None if it has another key, or there is none."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Experts that are the same in every model of the family."""

    def read(self, config: Mapping[str, Any]) -> Experts:
        """Read the experts that a config.json describes."""
        num_experts = next((config[key] for key in self.num_experts if key in config), None)
        if num_experts is None:
            raise InputError(f"config.json must have {self.num_experts[0]}, which the model is built with")
        width = read_count(config, self.ffn_hidden_size)
        others = {field: _read_field(config, field, key) for field, key in self.others.items()}
        if self.normalize_weights:
            others["normalize_weights"] = read_boolean(config, self.normalize_weights)
        if self.num_shared:
            others["shared_ffn_hidden_size"] = width * read_count(config, self.num_shared)
        experts = Experts(
            read_count(config, self.num_experts[0], num_experts),
            read_count(config, self.num_active),
            width,
            **others,
            **self.constants,
        )
        if mistake := find_mistake(experts, read_count(config, "num_hidden_layers")):
            raise InputError(f"config.json describes experts that are not supported: {mistake}")
        return experts

    def write(self, experts: Experts) -> dict[str, Any]:
        """Write the keys of experts that the family can have."""
        config: dict[str, Any] = {
            self.num_experts[0]: experts.num_experts,
            self.ffn_hidden_size: experts.ffn_hidden_size,
            self.num_active: experts.num_active,
        }
        if self.normalize_weights:
            config[self.normalize_weights] = experts.normalize_weights
        if self.num_shared:
            config[self.num_shared] = experts.shared_ffn_hidden_size // experts.ffn_hidden_size
        return config | {key: getattr(experts, field) for field, key in self.others.items()}

    def find_unsupported(self, architecture: Architecture) -> str | None:
        """Return a feature of these experts that the family cannot express; None if it can express all of them."""
        experts = architecture.experts
        assert experts is not None
        for field in dataclasses.fields(Experts):
            value = getattr(experts, field.name)
            if self.find_key(field.name) is None and value != self.constants.get(field.name, field.default):
                is_weights = field.name == "normalize_weights" and not value
                return "expert weights that are not normalized" if is_weights else f"experts.{field.name} = {value}"
        width = experts.shared_ffn_hidden_size
        if self.find_key("shared_ffn_hidden_size") and not width:
            return "no shared expert"
        if self.num_shared and width % experts.ffn_hidden_size:
            return f"a shared expert of {width} columns beside experts of {experts.ffn_hidden_size}"
        return find_mistake(experts, architecture.num_layers)

    def find_key(self, field: str) -> str | None:
        """Return the key of a field of Experts; None if it has none."""
        keys: dict[str, str | None] = {
            **self.others,
            "num_experts": self.num_experts[0],
            "num_active": self.num_active,
            "ffn_hidden_size": self.ffn_hidden_size,
            "normalize_weights": self.normalize_weights,
        }
        if self.num_shared:
            keys["shared_ffn_hidden_size"] = self.num_shared
        return keys.get(field)


def find_mistake(experts: Experts, num_layers: int) -> str | None:
    """Return a setting of experts that Megatron computes unlike transformers and vLLM; None if there is none."""
    if experts.num_dense_layers >= num_layers:
        return f"{experts.num_dense_layers} dense layers leave none of the {num_layers} layers with experts"
    if experts.score == "sigmoid" and experts.num_active == 1:
        return "one expert for each token, whose sigmoid Megatron does not normalize"
    groups, active = experts.num_groups, experts.num_active_groups
    if experts.num_experts % groups:
        return f"{experts.num_experts} experts cannot be divided into {groups} groups"
    if not 1 <= active <= groups:
        return f"{active} active groups of {groups}"
    if groups == 1:
        return None
    if experts.score != "softmax" and experts.num_active // active != 2:
        return (
            f"{experts.num_active} experts from {active} groups: engines compare groups by their two largest scores, "
            f"and Megatron by their {experts.num_active // active} largest"
        )
    if experts.num_experts // groups * active < experts.num_active:
        return f"{experts.num_active} experts from {active} groups of {experts.num_experts // groups}"
    return None


def _read_field(config: Mapping[str, Any], field: str, key: str) -> Any:
    """Return the value of a field of Experts, in the field's type."""
    if _TYPES[field] is bool:
        return read_boolean(config, key)
    if _TYPES[field] is float:
        return read_positive(config, key)
    return read_count(config, key, least=0 if field == "num_dense_layers" else 1)
