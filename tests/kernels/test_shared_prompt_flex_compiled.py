"""FlexAttention is compiled for every kind of inputs, or raises: uncompiled it would hold all scores at once."""

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.ops.shared_prompt.backends import flex
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.shared_prompt_cases import Case

pytestmark = pytest.mark.each_change

LAYOUT = Layout.of_groups([(5, [3, 2])])


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """List the calls of what torch compiled, with a compiler that leaves the operators unchanged."""
    calls: list[int] = []

    def count(graph, _inputs):
        return lambda *arguments: (calls.append(1), graph(*arguments))[1]

    compile_for_devices = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **kwargs: compile_for_devices(function, backend=count, **kwargs)
    )
    flex._flex_attention.cache_clear()
    torch.compiler.reset()
    yield calls
    flex._flex_attention.cache_clear()
    torch.compiler.reset()


def _attend(num_heads: int) -> None:
    case = Case.draw(LAYOUT, (num_heads, num_heads), 16, torch.float32)
    flex.attention(case.q_THD, case.k_TGD, case.v_TGD, LAYOUT, case.scale)


def test_kinds_of_inputs_beyond_the_bound_of_torch_are_compiled_too(compiled_calls: list[int]) -> None:
    with torch._dynamo.config.patch(cache_size_limit=1):
        for num_heads in range(1, 4):
            _attend(num_heads)
            assert len(compiled_calls) == num_heads


def test_a_kind_beyond_the_bound_is_an_error_and_not_computed_with_all_scores_at_once(
    compiled_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "KINDS", 1)
    _attend(1)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        _attend(2)
    assert compiled_calls == [1]
