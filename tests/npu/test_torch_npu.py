"""The real torch_npu, over stand-ins for CANN: it loads, and has the operators that we call as we call them."""

import inspect
import subprocess
import textwrap
from collections.abc import Mapping

import pytest

from tests.kernels.npu_operators import NpuOperators
from tests.npu import cann


def doctor(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return cann.run(environment, "-m", "megatron_rl.cli", "doctor", *words)


def test_without_cann_the_doctor_says_that_no_npu_is_used() -> None:
    done = doctor(cann.without_cann())
    assert "torch_npu is installed but does not load, so no NPU is used" in done.stderr
    assert "name                 cpu" in done.stdout
    assert done.returncode == 0, done.stderr


def test_an_npu_without_cann_is_a_problem_that_says_what_to_do(tmp_path) -> None:
    done = doctor(cann.without_cann() | cann.add_mindspeed("none", tmp_path, "0.16.0"), "--platform", "npu")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "PROBLEM: torch_npu does not load" in done.stderr
    assert "run CANN's set_env.sh" in done.stderr


def test_an_npu_without_mindspeed_is_a_problem_that_names_it(environment) -> None:
    done = doctor(environment)
    assert done.returncode == 3
    assert "name                 npu" in done.stdout
    assert "PROBLEM: mindspeed is not installed" in done.stderr


def test_the_platform_uses_what_torch_npu_has(environment) -> None:
    program = """
        import torch
        from megatron_rl.platforms import select
        platform = select()
        assert platform.name == "npu"
        platform.set_device(0)
        assert platform.device() == torch.device("npu", 0)
        side, event = platform.stream(), platform.event()
        with platform.on(side):
            assert platform.current_stream() == side
            event.record()
        platform.current_stream().wait_event(event)
        platform.current_stream().wait_stream(side)
        platform.synchronize()
        assert event.query()
        platform.seed(7)
        state = platform.rng_state()
        platform.set_rng_state(state)
        assert torch.equal(platform.rng_state(), state)
        before = platform.memory()
        held = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
        after = platform.memory()
        assert held.nbytes <= after.allocated - before.allocated <= held.nbytes + 4096
        assert after.allocated <= after.peak <= after.total == 1 << 34
        platform.reset_peak_memory()
        """
    done = cann.run(environment, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["npu_fusion_attention", "npu_fusion_attention_grad"])
def test_the_stand_in_for_an_operator_takes_what_the_operator_takes(name, environment) -> None:
    """Check the stand-in that all tests of our attention on NPUs use."""
    program = f"""
        import json, torch, torch_npu
        schema = torch.ops.npu.{name}.default._schema
        print(json.dumps([[one.name, one.kwarg_only] for one in schema.arguments]))
        """
    theirs = cann.last_line(environment, "-c", textwrap.dedent(program))
    ours = [parameter.name for parameter in inspect.signature(getattr(NpuOperators(), name)).parameters.values()]
    positional = [one for one, is_keyword in theirs if not is_keyword]
    assert ours[:5] == positional[:5]
    assert set(ours) <= {one for one, _ in theirs}


def test_our_attention_stays_on_the_device_forward_and_backward(environment) -> None:
    found = cann.last_line(environment, "-m", "tests.npu.passes", "attention")
    assert len(found) == 6
    assert set(found.values()) == {"npu:0"}, found


def test_log_probs_stay_on_the_device_forward_and_backward(environment) -> None:
    assert cann.last_line(environment, "-m", "tests.npu.passes", "log_probs") == {"log_probs": "npu:0"}


def test_a_tensor_on_the_host_and_a_number_that_is_read_are_found(environment) -> None:
    found = cann.last_line(environment, "-m", "tests.npu.passes", "faults")
    assert "at least two devices, npu:0 and cpu" in found["a tensor on the host"]
    assert "DataDependentOutputException" in found["a number that is read"]
