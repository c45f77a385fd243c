"""A user-defined family is compared with transformers at the start, in the layout of the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.trainer.mcore import bridge
from megatron_rl.trainer.mcore.bridge import check_bridge, find_worst, measure
from megatron_rl.trainer.mcore.model.gpt import unwrap
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.processes import ROOT
from tests.ranks import run_ranks

EXAMPLES = ROOT / "examples" / "families"
SOLAR, MINISTRAL = f"{EXAMPLES}/solar_open.py:SOLAR_OPEN", f"{EXAMPLES}/ministral.py:MINISTRAL"
_FULL, _LOCAL = "full_attention", "sliding_attention"
LAYOUTS = {SOLAR: ("EP2", "TP2+SP,EP2,ETP1"), MINISTRAL: ("TP2+SP", "PP2", "DP2+distopt")}
# A file that changes one of the examples.
FAULTY = """
import dataclasses, sys
sys.path.insert(0, {folder!r})
from {module} import {name}
from megatron_rl.shared.weights.families.names import Split
{change}
"""


def draw_solar(folder: Path, **changes: Any) -> Path:
    settings = {
        "num_hidden_layers": 2, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 1.5, "n_shared_experts": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "attention_bias": True, **changes,
    }  # fmt: skip
    return hf_models.draw_model(transformers.SolarOpenConfig, folder, **settings)


def draw_ministral(folder: Path, **changes: Any) -> Path:
    settings = {"head_dim": 8, "sliding_window": 11, "layer_types": [_LOCAL, _FULL, _LOCAL, _LOCAL], **changes}
    return hf_models.draw_model(transformers.MinistralConfig, folder, **settings)


def check(layout: str, folder: Path, guest: str, change: Callable[[Any, Any], None] | None = None) -> str:
    """Return what the check says, or its error."""
    with start_session(CASES[layout]) as session:
        model = build(session, CASES[layout], folder, read_architecture(folder, guest))
        chunks = [unwrap(chunk) for chunk in model.wrapped]
        if change is not None:
            with torch.no_grad():
                change(chunks, session)
        try:
            return check_bridge(chunks, model.weights, session, folder, divisor(CASES[layout].sizes))
        except InputError as error:
            return f"error: {error}"


def check_layouts(folders: dict[str, Path]) -> dict[tuple[str, str], str]:
    torch.distributed.init_process_group("gloo")
    found = {(guest, layout): check(layout, folders[guest], guest) for guest in LAYOUTS for layout in LAYOUTS[guest]}

    def change_second_replica(chunks: Any, session: Any) -> None:
        if session.replica == 1:
            chunks[0].decoder.layers[1].mlp.linear_fc2.weight.mul_(1.1)

    found["fault", "DP2+distopt"] = check("DP2+distopt", folders[MINISTRAL], MINISTRAL, change_second_replica)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {SOLAR: draw_solar(root / "solar"), MINISTRAL: draw_ministral(root / "ministral")}


def test_right_families_pass_in_every_layout_and_a_wrong_replica_is_found(folders: dict[str, Path]) -> None:
    for said in run_ranks(check_layouts, 2, folders):
        error = said.pop(("fault", "DP2+distopt"))
        assert "the model is not transformers' model" in error
        assert "off on average" in error
        for (guest, layout), line in said.items():
            print(layout, line)
            assert line.startswith(f"--weights-bridge {guest}: log-probs of 64 tokens are "), layout


FAULTS = {
    "queries and keys swapped": (
        "ministral",
        {"num_key_value_heads": 8},
        """
def swap(name):
    if name.split is not Split.QKV:
        return name
    q, k, v = name.sources
    return dataclasses.replace(name, sources=(k, q, v))
FAULTY = dataclasses.replace(MINISTRAL, names=tuple(map(swap, MINISTRAL.names)))
""",
        "the model is not transformers' model",
    ),
    "windows in other layers": (
        "ministral",
        {"sliding_window": 200, "without": "layer_types"},
        "FAULTY = dataclasses.replace(MINISTRAL, full_every=2)",
        "layer 1 has no window, and in transformers a window of 200 tokens",
    ),
    "scale of the experts forgotten": (
        "solar_open",
        {},
        """
others = {field: key for field, key in SOLAR_OPEN.experts.others.items() if field != "scaling_factor"}
FAULTY = dataclasses.replace(SOLAR_OPEN, experts=dataclasses.replace(SOLAR_OPEN.experts, others=others))
""",
        "the model is not transformers' model",
    ),
    "another base of the rope": (
        "solar_open",
        {"without": "rope_parameters"},
        """
defaults = {key: value for key, value in SOLAR_OPEN.defaults.items() if key != "rope_theta"}
FAULTY = dataclasses.replace(SOLAR_OPEN, defaults=defaults)
""",
        "the model is not transformers' model",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_family_is_found(fault: str, tmp_path: Path) -> None:
    name, changes, change, message = FAULTS[fault]
    settings = {key: value for key, value in changes.items() if key != "without"}
    folder = (draw_solar if name == "solar_open" else draw_ministral)(tmp_path / "model", **settings)
    if "without" in changes:
        config = json.loads((folder / "config.json").read_text())
        del config[changes["without"]]
        (folder / "config.json").write_text(json.dumps(config))
    source = FAULTY.format(folder=str(EXAMPLES), module=name, name=name.upper(), change=change)
    (tmp_path / "guest.py").write_text(source)
    said = check("TP1", folder, f"{tmp_path}/guest.py:FAULTY")
    print(said)
    assert said.startswith("error: ")
    assert message in said
    if "without" in changes:
        # The family itself knows what config.json leaves out.
        assert not check("TP1", folder, f"{EXAMPLES}/{name}.py:{name.upper()}").startswith("error")


def test_a_kind_of_attention_that_short_sequences_do_not_show_is_found(folders: dict[str, Path]) -> None:
    architecture = read_architecture(folders[SOLAR], SOLAR)
    config = transformers.SolarOpenConfig()
    config.layer_types = [_FULL, "chunked_attention"]
    with pytest.raises(InputError, match="layer 1 has no window, and in transformers attention of the kind 'chunked"):
        bridge._check_windows(config, architecture, "")


def transpose(chunks: Any, _: Any) -> None:
    weight = chunks[0].decoder.layers[2].self_attention.linear_proj.weight
    weight.copy_(weight.T.clone())


def nudge(chunks: Any, _: Any) -> None:
    weight = chunks[0].decoder.layers[2].mlp.linear_fc1.weight
    weight[3, 5] = torch.nextafter(weight[3, 5], weight.new_tensor(9.0))


@pytest.mark.parametrize("change", [transpose, nudge])
def test_tensors_that_are_not_those_of_the_folder_are_found(folders: dict[str, Path], change: Any) -> None:
    said = check("TP1", folders[MINISTRAL], MINISTRAL, change)
    assert "the model would be published with fingerprint" in said


def test_a_log_prob_that_is_not_a_number_is_never_near_enough() -> None:
    truth_T = torch.full((3,), -2.0, dtype=torch.float64)
    ours_T = torch.tensor([-2.0, torch.nan, -2.0], dtype=torch.float64)
    found = measure(ours_T, truth_T, truth_T, 1e-7)
    assert not found.ours <= found.bound
    near = measure(truth_T, truth_T, truth_T, 1e-7)
    assert find_worst([near, found, near]) is found


def test_transformers_must_have_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folders[MINISTRAL].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine"}
    (folder / "config.json").write_text(json.dumps(config))
    source = FAULTY.format(
        folder=str(EXAMPLES), module="ministral", name="MINISTRAL",
        change="MINE = dataclasses.replace(MINISTRAL, name='mine')",
    )  # fmt: skip
    (tmp_path / "guest.py").write_text(source)
    said = check("TP1", folder, f"{tmp_path}/guest.py:MINE")
    assert "transformers cannot load" in said
    assert "install a transformers that has it" in said


def test_a_model_without_room_on_the_host_is_refused_by_name(folders: dict[str, Path], monkeypatch: Any) -> None:
    monkeypatch.setattr(bridge, "read_free_memory", lambda: 1 << 20)
    said = check("TP1", folders[MINISTRAL], MINISTRAL)
    assert "needs 0.0 GiB of rank 0's host, and 0.0 GiB are free: run rank 0 on a host with more" in said


def test_a_layer_at_a_time_is_widened_and_all_are_narrow_again(folders: dict[str, Path]) -> None:
    ids = hf_models.sequences([20])[0]
    for guest in LAYOUTS:
        with bridge._loaded(folders[guest], "bfloat16", "") as model:
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with bridge._widened(model, torch.float32):
                found_T = bridge._compute_log_probs(model, ids)
            for name, tensor in model.state_dict().items():
                assert tensor.dtype == before[name].dtype
                assert torch.equal(tensor, before[name]), name
            theirs_T = bridge._compute_log_probs(model, ids)
            expected_T = bridge._compute_log_probs(model.float(), ids)
        assert (found_T - expected_T).abs().max() < 1e-2 * (theirs_T - expected_T).abs().max()
