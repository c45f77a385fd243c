"""PEFT and adapters of experts, which transformers holds in one tensor for all experts of a layer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterMapping,
    check_config,
    describe_for_peft,
)
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from tests import hf_models
from tests.sidecar import adapter_folders

pytestmark = pytest.mark.slow
RANK = adapter_folders.RANK


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_peft_reads_our_adapters_of_experts_and_those_that_it_writes_are_refused(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, ours, theirs = hf_models.draw(family, tmp_path / "base"), tmp_path / "ours", tmp_path / "theirs"
    factors = {name: 0.3 * factor for name, factor in adapter_folders.draw_factors(base, 0).items()}
    adapters = AdapterMapping(Mapping(read_architecture(base)), RANK)
    ours.mkdir()
    save_file(factors, ours / WEIGHTS_FILE)
    (ours / CONFIG_FILE).write_text(json.dumps(describe_for_peft(adapters, RANK, str(base))))
    sequences = hf_models.sequences([30, 21])
    model = peft.PeftModel.from_pretrained(hf_models.load(base), ours)
    with torch.no_grad():
        found = torch.cat(hf_models.decode_log_probs(model, sequences))
    merged = adapter_folders.merge(base, factors, tmp_path / "merged")
    expected, of_base = (torch.cat(hf_models.log_probs(folder, sequences)) for folder in (merged, base))
    distance = (found - expected).abs().max()
    assert distance < 1e-3 * (of_base - expected).abs().max()
    check_config(ours, RANK, RANK)
    model.save_pretrained(theirs)
    with pytest.raises(InputError, match="all experts of a layer .*write --hf-model with that folder"):
        check_config(theirs, RANK, RANK)
