"""Whether a load changed what a model holds, also where layers pack their weights away; without vLLM."""

import copy

import torch

from megatron_rl.sidecar.vllm_held import checksums, packed_away


class Packs:
    """As vLLM does on a CPU: a layout of its own, and nothing left of the parameter."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Keeps:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()


def model() -> torch.nn.Module:
    layers = torch.nn.ModuleDict(
        {"packs": torch.nn.Linear(4, 4), "keeps": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)}
    )
    layers["packs"].quant_method, layers["keeps"].quant_method = Packs(), Keeps()
    return layers


def load(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    with packed_away(model) as packed:
        for name, layer in model.named_children():
            layer.weight = torch.nn.Parameter(tensors[f"{name}.weight"].clone())
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
    return checksums(model, packed)


def test_every_parameter_is_in_it_whether_it_was_packed_away_or_not():
    held, tensors = model(), dict(model().named_parameters())
    before = load(held, tensors)
    assert before.keys() == tensors.keys()
    assert load(held, tensors) == before
    for name in ("packs.weight", "keeps.weight", "norm.weight"):
        changed = copy.deepcopy(tensors)
        changed[name].data.view(-1).view(torch.int32)[1] += 1
        after = load(held, changed)
        assert {key for key in before if after[key] != before[key]} == {name}


def test_what_watches_a_load_leaves_no_trace():
    held = model()
    with packed_away(held):
        assert "process_weights_after_loading" in vars(held["packs"].quant_method)
    assert not vars(held["packs"].quant_method)
