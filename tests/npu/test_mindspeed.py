"""The platform of NPUs as a run installs it: MindSpeed's adaptor on the real torch_npu, over stand-ins for CANN."""

import pytest

from tests import hf_models
from tests.command_lines import CPU, DENSE, parse, without
from tests.npu.cann import last_line
from tests.npu.passes import ON_NPU, describe

# Differences that follow from MindSpeed's kernels.
OF_THE_PLATFORM = {"bias_activation_fusion", "gradient_accumulation_fusion", "transformer_impl"}
LAYOUTS = ("", "--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in hf_models.CONFIGS:
        hf_models.draw(name, folder / name)
    return folder


def test_every_kind_of_layer_goes_forward_and_backward_on_the_device(models, with_mindspeed) -> None:
    found = last_line(with_mindspeed, "-m", "tests.npu.passes", "models", str(models))
    # `merge` has no windows, and `gather` no sinks.
    num_left_out = 2 * len(hf_models.WITH_WINDOW) + 2
    assert len(found) == len(hf_models.CONFIGS) * 2 * len(ON_NPU) - num_left_out
    of_experts = {title for title in found if title.split()[0] in hf_models.WITH_EXPERTS}
    assert {found[title] for title in found.keys() - of_experts} == {"npu:0"}, found
    # It runs up to Megatron's dispatcher, which reads on the host how many tokens each expert has.
    assert {found[title] for title in of_experts} == {"DynamicOutputShapeException: aten.masked_select.default"}, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_configuration_is_that_of_the_cpu_but_for_the_platforms_kernels(layout, with_mindspeed) -> None:
    """Check the adaptor, which once put the words of the command line into every configuration, unconverted."""
    words, world_size = [*without(DENSE, "--platform"), *layout.split()], 2 if layout else 1
    theirs = last_line(
        with_mindspeed | {"WORLD_SIZE": str(world_size)}, "-m", "tests.npu.passes", "configuration", *words
    )
    expected = describe(parse(*words, *CPU, world_size=world_size).transformer)
    differing = {name for name in expected if theirs.get(name) != expected[name]}
    assert differing == OF_THE_PLATFORM, {name: (expected[name], theirs.get(name)) for name in differing}
