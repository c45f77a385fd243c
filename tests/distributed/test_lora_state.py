"""The roles of one base, checkpoints of adapters alone, and folders in PEFT's format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.adapters import CONFIG_FILE, WEIGHTS_FILE
from megatron_rl.trainer.mcore.model.adapter_files import load_adapters
from megatron_rl.trainer.mcore.model.gpt import named_shards
from megatron_rl.trainer.mcore.model.lora import Role
from megatron_rl.trainer.mcore.step.forward_step import compute_log_probs
from megatron_rl.trainer.mcore.step.policy import BaseAsReference
from tests import hf_models
from tests.distributed.layouts import divisor
from tests.distributed.parity import shared_packs
from tests.distributed.test_lora import LORA, fill, gather_factors
from tests.distributed.training import Training, checkpointer, training
from tests.ranks import run_ranks
from tests.truth import error_over_bound, everything_in

pytestmark = pytest.mark.each_change

TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
EXTRA = {"version": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("model") / "qwen3", num_hidden_layers=2)


def log_probs(trained: Training, role: Role) -> list[torch.Tensor]:
    assert trained.base is not None
    inner = trained.base.adapters.play([chunk.module for chunk in trained.wrapped], role)
    packs = trained.mine(shared_packs(divisor(trained.session.sizes)))
    return trained._everywhere(compute_log_probs(inner, packs))


def play(folder: Path, other: Path, out: Path) -> dict[str, Any]:
    """Compute in all roles while adapters change, and write what is left of them."""
    torch.distributed.init_process_group("gloo")
    packs = shared_packs(2)
    with training(folder, f"{PP2} --lr 1e-3") as plain:
        base, whole = plain.forward(packs), plain.weights.fingerprint()
        num_plain = sum(parameter.numel() for _, parameter in named_shards(plain.chunks))
    found: dict[str, Any] = {"base": base}
    with training(folder, f"{PP2} {LORA}") as trained:
        assert trained.base is not None
        reference = BaseAsReference(trained.policy, trained.session, None)
        found["first"] = trained.forward(packs)
        assert trained.weights.fingerprint() == trained.base.fingerprint == whole
        assert reference.is_policy(trained.weights, 0, whole)
        found["initial"] = gather_factors(trained, "data")
        give_least_numbers(trained)
        assert trained.weights.fingerprint() == whole
        assert not reference.is_policy(trained.weights, 1, whole)
        fill(trained)
        assert not reference.is_policy(trained.weights, 1, whole)
        before = trained.forward(packs)
        trained.base.adapters.keep()
        trained.update()
        found |= {
            "before": before,
            "old": log_probs(trained, Role.OLD),
            "reference": log_probs(trained, Role.REFERENCE),
        }
        found["after"] = trained.forward(packs)
        assert trained.base.weights.fingerprint() == whole != trained.weights.fingerprint()
        found["counts"] = count(trained, num_plain)
        checkpointer(trained, save=out / "checkpoint").save(1, EXTRA)
        trained.base.save_adapters(trained.session, out / "adapter", None)
        trained.weights.save_hf(out / "merged", folder)
        found["factors"] = gather_factors(trained, "data")
        trained.update()
        found["next"] = gather_factors(trained, "data")
    with training(folder, f"{PP2} {LORA} --load {out / 'checkpoint'}") as resumed:
        checkpointer(resumed).load()
        resumed.update()
        found["resumed"] = gather_factors(resumed, "data")
    words = f"{PP2} {LORA} --finetune --load {out / 'checkpoint'}"
    with training(other, words) as unrelated, pytest.raises(InputError, match="holds adapters of the base"):
        checkpointer(unrelated).load()
    with training(folder, f"{TP2} {LORA} --load {out / 'checkpoint'}") as moved:
        found["initial in TP2"] = gather_factors(moved, "data")
        checkpointer(moved).load()
        found["moved"] = gather_factors(moved, "data")
    return found


def give_least_numbers(trained: Training) -> None:
    """Give B numbers that are lost when they are merged."""
    assert trained.base is not None
    for shard in trained.base.adapters.shards:
        if shard.parameter_name.endswith("lora_B.weight"):
            shard.parameter.detach().fill_(1e-30)


def count(trained: Training, num_plain: int) -> dict[str, int]:
    """Count numbers: the adapters', and those that gradients, optimizer and model hold."""
    assert trained.base is not None
    mine = {id(shard.parameter) for shard in trained.base.adapters.shards}
    everything = {id(p): p for chunk in trained.chunks for p in chunk.parameters()}
    state = trained.optimizer.optimizer.state
    return {
        "adapters": sum(everything[one].numel() for one in mine),
        "gradients": sum(buffer.grad_data.numel() for chunk in trained.wrapped for buffer in chunk.buffers),
        "state": sum(values["exp_avg"].numel() for values in state.values()),
        "base": sum(p.numel() for one, p in everything.items() if one not in mine) - num_plain,
    }


def reload(folder: Path, theirs: Path, others: Path) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    with training(folder, f"{TP2} {LORA} --load-lora {theirs}") as trained:
        assert trained.base is not None
        found: dict[str, Any] = {"factors": gather_factors(trained, "data")}
        refusals = []
        for other in sorted(others.iterdir()):
            try:
                load_adapters(trained.base.adapters, trained.session, other, trained.base.fingerprint)
            except InputError as error:
                refusals.append(str(error))
        return found | {"refusals": refusals}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def played(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("out")
    other = hf_models.draw("qwen3", out / "other", seed=1, num_hidden_layers=2)
    return out, run_ranks(play, 2, folder, other, out)[0]


def test_all_roles_share_one_base(played: tuple[Path, dict[str, Any]]) -> None:
    _, found = played
    assert equal(found["first"], found["base"])
    assert equal(found["reference"], found["base"])
    assert equal(found["old"], found["before"])
    assert not equal(found["before"], found["base"])
    assert not equal(found["after"], found["before"])


def test_the_first_numbers_are_drawn_as_peft_does_in_any_layout(played: tuple[Path, dict[str, Any]]) -> None:
    found = played[1]
    assert equal(found["initial"], found["initial in TP2"])
    for name, factor in found["initial"].items():
        # torch.nn.Linear's own bound, from which PEFT draws A.
        bound = 0 if name.endswith("lora_B.weight") else factor.shape[1] ** -0.5
        assert factor.abs().max() <= bound
        assert factor.std() >= bound / 2


def test_gradients_and_optimizer_are_of_adapters_alone(played: tuple[Path, dict[str, Any]]) -> None:
    counts = played[1]["counts"]
    assert counts["state"] == counts["adapters"] <= counts["gradients"] < 1.1 * counts["adapters"] + 1000
    assert counts["base"] == 0


def test_a_checkpoint_of_adapters_resumes_bit_for_bit_and_in_another_layout(
    played: tuple[Path, dict[str, Any]],
) -> None:
    out, found = played
    assert equal(found["resumed"], found["next"])
    assert not equal(found["next"], found["factors"])
    assert equal(found["moved"], found["factors"])
    tensors = FileSystemReader(out / "checkpoint" / "iter_0000001").read_metadata().state_dict_metadata
    sizes = [tensor.size.numel() for tensor in tensors.values() if isinstance(tensor, TensorStorageMetadata)]
    # Factors with two moments each, and nothing of the base.
    assert sum(sizes) == 3 * sum(factor.numel() for factor in found["factors"].values())


def test_peft_computes_with_our_adapters_what_we_do(
    folder: Path, played: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="make test-all runs it, in an environment with peft")
    out, found = played
    sequences = hf_models.sequences([30, 21, 40])
    model = peft.PeftModel.from_pretrained(hf_models.load(folder), out / "adapter")
    model.save_pretrained(tmp_path / "theirs")
    packed = {}
    for dtype in (torch.float32, torch.float64):
        with torch.no_grad(), everything_in(dtype):
            packed[dtype] = torch.cat(hf_models.decode_log_probs(model.to(dtype), sequences))
    merged = torch.cat(hf_models.log_probs(out / "merged", sequences))
    assert error_over_bound(merged, packed[torch.float32], packed[torch.float64]) <= 1
    (tmp_path / "others").mkdir()
    for name, changes in (("0", {"r": 8}), ("1", {"use_dora": True}), ("2", {})):
        other = tmp_path / "others" / name
        other.mkdir()
        config = json.loads((out / "adapter" / CONFIG_FILE).read_text()) | changes
        (other / CONFIG_FILE).write_text(json.dumps(config))
        text = (out / "adapter" / WEIGHTS_FILE).read_bytes()
        fingerprint = text[text.index(b"base_fingerprint") + 19 :][:16]
        (other / WEIGHTS_FILE).write_bytes(text.replace(fingerprint, fingerprint[::-1]))
    again = run_ranks(reload, 2, folder, tmp_path / "theirs", tmp_path / "others")[0]
    assert equal(again["factors"], found["factors"])
    of_rank, of_dora, of_base = again["refusals"]
    assert "--lora-rank" in of_rank
    assert "use_dora" in of_dora
    assert "was trained on the base" in of_base
