"""Megatron's own parser and ours, on the same recipes."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.command_line import flags
from megatron_rl.command_line import parse as command_line
from megatron_rl.command_line import resolve as config
from megatron_rl.command_line.other_projects import find_project
from megatron_rl.config.settings import Settings
from megatron_rl.flag import index_by_name
from tests import recipes
from tests.launch_scripts import read_blocks

# Fields in which we differ on purpose. A difference that is missing here fails the test, and so does a field here that
# does not differ.
DIFFERENCES = {
    "transformer": {
        "variable_seq_lengths": "packed groups differ in length, so pipeline stages tell each other the shape",
        "moe_token_dispatcher_type": "dense models are given alltoall, because allgather excludes variable lengths",
        "inference_sampling_seed": "Megatron's inference, which does not run here, would take --seed",
        "tensor_parallel_num_weight_shards": "their parser writes out what the field's default, None, means",
        "expert_tensor_parallel_num_weight_shards": "their parser writes out what the field's default, None, means",
        "perform_initialization": "weights are loaded: none are drawn",
        "attention_backend": "nothing here reads it: attention is an operation of this package",
        "deallocate_pipeline_outputs": "with virtual stages 0.16 computes wrong gradients with it, and says nothing",
        "init_method": "weights are loaded: none are drawn",
        "output_layer_init_method": "weights are loaded: none are drawn",
        "init_method_std": "weights are loaded: none are drawn",
        "embedding_init_method": "weights are loaded: none are drawn",
        "embedding_init_method_std": "weights are loaded: none are drawn",
        "attention_softmax_in_fp32": "nothing here reads it: attention is an operation of this package",
        "masked_softmax_fusion": "nothing here reads it: attention is an operation of this package",
        "persist_layer_norm": "nothing here reads it: norms are those of this package, or TransformerEngine's",
        "use_cpu_initialization": "their parser leaves None where the field's default, False, means the same",
    },
    "optimizer": {
        "fp8_recipe": "it belongs to training in fp8, which is refused",
        "muon_momentum": "it belongs to an optimizer that is refused",
        "barrier_with_L1_time": "it belongs to Megatron's timers, which do not run here",
    },
    "ddp": {
        "check_for_nan_in_grad": "the norm of the reduced gradients is checked instead",
        "data_parallel_sharding_strategy": "it belongs to FSDP, which is refused",
    },
}


@dataclasses.dataclass(frozen=True)
class Configs:
    """megatron-core's three configurations of a run."""

    transformer: Any
    optimizer: Any
    ddp: Any


@pytest.fixture
def their_parser(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Configs]:
    """Return megatron.training's own parser, with the values that it derives."""
    from megatron.training import arguments as theirs
    from megatron.training import training

    # It asks for the compute capability of a GPU: of Hopper, as for the recipes.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(theirs, "get_device_arch_version", lambda: 9)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("RANK", "0")

    def parse(words: list[str]) -> Configs:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        # Launch scripts of others have flags of their own.
        parsed = theirs.validate_args(theirs.parse_args(ignore_unknown_args=True))
        return Configs(
            theirs.core_transformer_config_from_args(parsed),
            training.get_megatron_optimizer_config(parsed)[0],
            training.get_megatron_ddp_config(parsed),
        )

    return parse


@pytest.fixture
def their_configs(
    monkeypatch: pytest.MonkeyPatch, their_parser: Callable[[list[str]], Configs]
) -> Callable[[str], Configs]:
    """Return a function that configures a recipe by Megatron's parser."""

    def configs(name: str) -> Configs:
        monkeypatch.setenv("WORLD_SIZE", str(recipes.WORLD_SIZES[name]))
        return their_parser(recipes.words(name))

    return configs


@pytest.fixture
def our_configs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Configs]:
    """Return a function that configures a recipe by our parser, on a platform that can do everything."""
    monkeypatch.setattr(config, "_settle_limits", lambda *_: {})

    def configs(name: str) -> Configs:
        monkeypatch.setenv("WORLD_SIZE", str(recipes.WORLD_SIZES[name]))
        settings = command_line.parse([*recipes.words(name), "--platform", "cpu"])
        return Configs(settings.transformer, settings.optimizer, settings.ddp)

    return configs


def differences(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    pairs = {
        field.name: (getattr(theirs, field.name), getattr(ours, field.name)) for field in dataclasses.fields(theirs)
    }
    return {name: pair for name, pair in pairs.items() if not same(*pair)}


def same(one: Any, other: Any) -> bool:
    """Compare for equality; initial distributions, new in each config, are equal if they draw the same numbers."""
    if callable(one) and callable(other) and not isinstance(one, type):
        return one is other or torch.equal(drawn(one), drawn(other))
    return bool(one == other) and type(one) is type(other)


def drawn(initialize: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(1)
    return initialize(torch.empty(8, 8))


@pytest.mark.parametrize("subject", DIFFERENCES)
@pytest.mark.parametrize("name", recipes.NAMES)
def test_both_parsers_give_equal_configurations(
    name: str, subject: str, their_configs: Callable[[str], Configs], our_configs: Callable[[str], Configs]
) -> None:
    found = differences(getattr(their_configs(name), subject), getattr(our_configs(name), subject))
    assert not {field: pair for field, pair in found.items() if field not in DIFFERENCES[subject]}


@pytest.mark.parametrize("subject", DIFFERENCES)
def test_every_difference_that_is_allowed_occurs(
    subject: str, their_configs: Callable[[str], Configs], our_configs: Callable[[str], Configs]
) -> None:
    found: set[str] = set()
    for name in recipes.NAMES:
        found |= set(differences(getattr(their_configs(name), subject), getattr(our_configs(name), subject)))
    assert found == set(DIFFERENCES[subject])


# The fields in which configurations of real launch scripts differ besides, with the flag that our note names for each.
SAID = {
    "hidden_dropout": "--hidden-dropout",
    "attention_dropout": "--attention-dropout",
    "tp_comm_overlap": "--tp-comm-overlap",
    "cuda_graph_impl": "--cuda-graph-impl",
    "inference_cuda_graph_scope": "--cuda-graph-impl",
    "calculate_per_token_loss": "--calculate-per-token-loss",
    "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion",
    "deterministic_mode": "--deterministic-mode",
    # The platform of these tests computes the same without.
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    **dict.fromkeys(
        ("use_precision_aware_optimizer", "store_param_remainders", "megatron_fsdp_use_decoupled_grad"),
        "--use-precision-aware-optimizer",
    ),
}
OF_CONFIG_JSON = {"layernorm_epsilon", "window_size"}
# Only --print-config says it: context-parallel ranks exchange heads, with the same results.
SHOWN = {"cp_comm_type"}
# Kernels of TransformerEngine, which flags name and this machine lacks.
KERNELS = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs", "fused_unpermute",
    ),
}  # fmt: skip
# Values that forks have beside Megatron's; nothing here depends on a tokenizer's.
_TOKENIZERS = ("PretrainedFromHF", "LLama3Tokenizer", "MixtralTokenizer", "Qwen2Tokenizer", "Qwen3Tokenizer")
OF_FORKS = {("--moe-token-dispatcher-type", "alltoall_seq"), ("--moe-layer-freq", "-1")} | {
    ("--tokenizer-type", name) for name in _TOKENIZERS
}
OF_SLIME = "taken as slime's, whose runs have --bf16, --use-distributed-optimizer"
BLOCKS = [block for block in read_blocks() if not block.refused]


def test_launch_scripts_of_other_projects_come_to_megatrons_configurations_but_for_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, their_parser: Callable[[list[str]], Configs]
) -> None:
    monkeypatch.setattr(config, "_settle_limits", lambda *_: {})
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(f"{module}.{name}", object())
    unsaid, met = {}, set()
    for number, block in enumerate(BLOCKS):
        words = block.complete(tmp_path / str(number))
        monkeypatch.setenv("WORLD_SIZE", str(block.ranks))
        settings = command_line.parse([*words, "--platform", "cpu"])
        theirs = their_parser(_complete_for_theirs(words, settings))
        found = {
            field
            for subject, allowed in DIFFERENCES.items()
            for field in differences(getattr(theirs, subject), getattr(settings, subject)).keys() - set(allowed)
        }
        notes = "\n".join(settings.notes)
        left = {field for field in found - OF_CONFIG_JSON - SHOWN if SAID.get(field, "nothing") not in notes}
        if left:
            unsaid[block.name] = left
        met |= found
    assert not unsaid
    assert met == SAID.keys() | OF_CONFIG_JSON | SHOWN
    assert len(BLOCKS) >= 60


def _complete_for_theirs(words: list[str], settings: Settings) -> list[str]:
    """Add the values that our parser takes from config.json, and drop those that only forks know."""
    architecture, transformer = settings.architecture, settings.transformer
    described = {
        "--num-layers": transformer.num_layers,
        "--hidden-size": transformer.hidden_size,
        "--ffn-hidden-size": transformer.ffn_hidden_size,
        "--num-attention-heads": transformer.num_attention_heads,
        "--max-position-embeddings": architecture.max_position_embeddings,
        "--seq-length": settings.training.seq_length,
        "--micro-batch-size": 1,
    }
    words = list(words)
    if OF_SLIME in "\n".join(settings.notes):
        # Its own parser sets them.
        words += ["--bf16", "--use-distributed-optimizer"]
    for flag, value in OF_FORKS:
        if flag in words and words[words.index(flag) + 1] == value:
            place = words.index(flag)
            del words[place : place + 2]
    return [*words, *(word for flag, value in described.items() if flag not in words for word in (flag, str(value)))]


def test_every_flag_of_megatrons_parser_is_in_one_of_the_three_classes_and_takes_as_many_words() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    known = index_by_name(flags.list_flags())
    names = {name for action in parser._actions for name in action.option_strings}
    assert len(names) > 500
    # Flags of Megatron-LM's own RL loop are rewritten to ours.
    assert not {name for name in names - set(known) if find_project(name) is None}
    wrong = [
        name
        for action in parser._actions
        for name in action.option_strings
        if name in known
        if (action.nargs == 0) != known[name].is_switch or (action.nargs in (None, 0)) != (known[name].nargs is None)
    ]
    assert not wrong
