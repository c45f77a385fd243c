"""The flags of adapters, what they exclude, and the modules that they name."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.adapters import AdapterMapping, check_config, describe_for_peft
from megatron_rl.shared.weights.mapping import Coordinates, Mapping
from megatron_rl.types import Experts, Latents
from tests.command_lines import CPU, QWEN3, RUN, folder, keep_one_parser, parse_run, run_problems

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (*CPU, "--hf-model", folder(tmp_path_factory.mktemp("model"), QWEN3), *RUN)


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


@pytest.mark.parametrize(
    ("words", "alpha", "rank_of_engines", "is_base_proved"),
    [
        ("", 8, 0, False),
        ("--lora-alpha 3", 3, 0, False),
        ("--publish-lora adapter", 8, 4, True),
        # An engine that quantizes may start again in the middle of a run, and only the probe shows what it holds.
        ("--publish-lora adapter --publish-proof probe", 8, 4, False),
    ],
)
def test_flags_decide_the_scale_of_adapters_what_engines_take_and_the_length_of_probes(
    run: tuple[str, ...], words: str, alpha: float, rank_of_engines: int, is_base_proved: bool
) -> None:
    settings = parse_run(*run, f"--lora-rank 4 {words}", world_size=1)
    assert settings.lora.used_alpha == alpha
    assert settings.rollout.lora_rank == rank_of_engines
    assert settings.publish.is_base_proved is is_base_proved


def test_adapters_of_experts_do_not_come_alone(tmp_path: Path) -> None:
    sparse = dataclasses.replace(QWEN3, family="qwen3_moe", experts=Experts(8, 2, 48))
    words = (*CPU, "--hf-model", folder(tmp_path, sparse), *RUN, "--lora-rank 4 --publish-lora adapter")
    found = run_problems(*words, world_size=1)
    assert any("--publish-lora adapter: the adapters of experts" in problem for problem in found)
    (problem,) = run_problems(*words, "--lora-targets q_proj v_proj", world_size=1)
    assert "vLLM's kernel for experts on CPUs takes no adapters" in problem


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_number_of_a_factor_is_written_by_one_rank(size: int) -> None:
    """Count what tensor-parallel ranks write: a factor that they do not divide belongs to one of them."""
    adapters = AdapterMapping(Mapping(QWEN3), 4)
    counts = {spec.name: torch.zeros(spec.shape) for spec in adapters.manifest("float32")}
    names = [f"decoder.layers.{layer}.{linear}.weight" for layer in range(QWEN3.num_layers) for linear in LINEARS]
    for coordinates in (Coordinates(tensor_rank=rank, tensor_size=size) for rank in range(size)):
        parts = [part for name in names for part in adapters.place(name, coordinates, 256)]
        for piece in [piece for part in parts for one in (part.a, part.b) if one.owned for piece in one.pieces]:
            counts[piece.name].narrow(piece.dim, piece.source, piece.length).add_(1)
    assert all(bool((count == 1).all()) for count in counts.values())


def test_each_module_of_a_fused_weight_has_its_own_rows() -> None:
    adapters = AdapterMapping(Mapping(QWEN3), 4, ["q_proj", "v_proj"])
    parts = [adapters.place(QKV, Coordinates(tensor_rank=rank, tensor_size=2), 256) for rank in range(2)]
    for rank, (queries, values) in enumerate(parts):
        assert (queries.module, values.module) == tuple(f"model.layers.1.self_attn.{one}_proj" for one in "qv")
        # A rank has two groups of two heads of queries, a key and a value, with 32 rows each.
        assert queries.rows == (*range(64), *range(128, 192))
        assert values.rows == (*range(96, 128), *range(224, 256))
        assert (queries.b.pieces[0].source, values.b.pieces[0].source) == (128 * rank, 64 * rank)
        assert queries.a.shape == (4, 64)
        assert (queries.a.owned, queries.b.owned) == (rank == 0, True)


def test_every_product_of_latent_attention_has_an_adapter_unless_targets_are_named() -> None:
    latents = Latents(kv_rank=16, plain_dim=8, rotary_dim=4, value_dim=8, query_rank=8)
    architecture = dataclasses.replace(QWEN3, family="glm4_moe_lite", latents=latents)
    adapters = AdapterMapping(Mapping(architecture), 4)
    wanted = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert {*wanted} < {*adapters.targets}
    (part,) = adapters.place(
        "decoder.layers.1.self_attention.linear_kv_down_proj.weight", Coordinates(tensor_rank=1, tensor_size=2), 256
    )
    # The rows of a narrow row and of the part that rotates, of which the second rank has the second half.
    assert part.module == "model.layers.1.self_attn.kv_a_proj_with_mqa"
    assert (part.a.shape, part.b.shape) == ((4, 64), (10, 4))
    assert (part.b.pieces[0].source, part.splits_inputs) == (10, False)


@pytest.mark.parametrize("words", ["--decoupled-lr 0.001", "--apply-wd-to-qk-layernorm"])
def test_flags_of_frozen_weights_are_said_to_have_no_effect(run: tuple[str, ...], words: str) -> None:
    for lora, is_said in (((), False), (("--lora-rank", "8"), True)):
        notes = parse_run(*run, *lora, *words.split(), world_size=1).notes
        assert any(words.split()[0] in note and "has no effect with --lora-rank" in note for note in notes) == is_said


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, ""),
        *(({"init_lora_weights": drawn}, "") for drawn in (False, None, "gaussian", "Gaussian", "eva", "orthogonal")),
        *(
            ({"init_lora_weights": drawn}, f'init_lora_weights "{drawn}", with which PEFT loads another base')
            for drawn in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "mica")
        ),
        ({"alora_invocation_tokens": [15, 16]}, "has alora_invocation_tokens, with which"),
        ({"use_qalora": True}, "has use_qalora, with which"),
        ({"use_bdlora": {"nblocks": 2}}, "has use_bdlora, with which"),
        ({"a_key_of_tomorrow": {"x": 1}}, "has a_key_of_tomorrow, with which"),
        ({"a_key_of_tomorrow": None, "use_qalora": False, "qalora_group_size": 16, "loftq_config": {}}, ""),
    ],
)
def test_adapters_that_compute_something_else_are_refused(
    settings: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    config = describe_for_peft(AdapterMapping(Mapping(QWEN3), 4), 8, "base") | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=refused) if refused else contextlib.nullcontext():
        check_config(tmp_path, 4, 8)


def test_a_configuration_that_peft_writes_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    check_config(tmp_path, 4, 8)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adapter_config\.json cannot be read"):
        check_config(tmp_path, 4, 8)
