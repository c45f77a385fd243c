"""Fields of megatron-core's configurations that used flags set are read by something when a model is trained.

A field that is never read changes nothing, whatever its flag says. See tests/unit/test_every_flag.py for the flags
themselves.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.command_line import flags, resolve
from megatron_rl.flag import Flag, Kind
from tests import hf_models
from tests.distributed.training import settings_of, start_session, training_in
from tests.ranks import run_ranks

# A model and flags; together they have every part that reads a field on a CPU.
RUNS = (
    ("qwen3", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000 --bf16"),
    ("qwen3", "--tensor-model-parallel-size 2 --sequence-parallel --fp16 --decoupled-lr 1e-4"),
    (
        "qwen3",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    ("qwen3_moe", "--expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01"),
    ("qwen3_moe", "--recompute-granularity selective --recompute-modules core_attn moe --optimizer sgd"),
)
_ALLOWS_ONE = "one value is taken, and another is an error"
_ENGINE = "TransformerEngine's layers read it"
_PRECISE = "--use-precision-aware-optimizer reads it, which needs TransformerEngine"
_OFFLOADED = "--optimizer-cpu-offload reads it, which needs TransformerEngine"
_BUILT = "it is read when the configuration is built"
# Fields that nothing reads on a CPU, with the code that does, or the code that reads another field in their place.
ELSEWHERE = {
    "transformer.moe_layer_freq": "the model's own pattern of layers is read, which another value contradicts",
    "transformer.moe_router_bias_update_rate": "routers with a bias read it, which these models do not have",
    "transformer.attention_dropout": _ALLOWS_ONE,
    "transformer.cp_comm_type": "with context-parallel ranks another than the one that runs is an error",
    "transformer.moe_grouped_gemm": _ENGINE,
    "transformer.disable_bf16_reduced_precision_matmul": _BUILT,
    "transformer.moe_layer_recompute": _BUILT,
    "optimizer.overlap_param_gather": "the field of that name of DistributedDataParallelConfig is read",
    "optimizer.main_grads_dtype": _PRECISE,
    "optimizer.main_params_dtype": _PRECISE,
    "optimizer.exp_avg_dtype": _PRECISE,
    "optimizer.exp_avg_sq_dtype": _PRECISE,
    "optimizer.optimizer_offload_fraction": _OFFLOADED,
    "optimizer.use_torch_optimizer_for_cpu_offload": _OFFLOADED,
    "optimizer.overlap_cpu_optimizer_d2h_h2d": _OFFLOADED,
    "optimizer.pin_cpu_grads": _OFFLOADED,
    "optimizer.pin_cpu_params": _OFFLOADED,
    "ddp.disable_symmetric_registration": "--use-nccl-ub reads it, which needs NCCL",
}


@contextlib.contextmanager
def reads_recorded(into: set[str]) -> Iterator[None]:
    """Note every field of the configurations that is read, but for comparing and printing them."""

    def recorder(subject: str, names: set[str]):
        def read(self: object, name: str) -> object:
            if name in names and sys._getframe(1).f_code.co_name not in ("__eq__", "__repr__"):
                into.add(f"{subject}.{name}")
            return object.__getattribute__(self, name)

        return read

    configs = flags.import_configs()
    for subject, config in configs.items():
        config.__getattribute__ = recorder(subject, {field.name for field in dataclasses.fields(config)})
    try:
        yield
    finally:
        for config in configs.values():
            del config.__getattribute__


def fields_read(folders: dict[str, Path]) -> set[str]:
    """Record the fields that a session, a model and two updates read on these ranks."""
    torch.distributed.init_process_group("gloo")
    read: set[str] = set()
    for model, words in RUNS:
        settings = settings_of(folders[model], f"--lr 1e-3 {words}")
        with reads_recorded(read), start_session(settings) as session:
            trained = training_in(session, settings)
            trained.update()
            trained.update()
    return read


def never_read(of: Iterable[Flag], read: set[str]) -> dict[str, str]:
    """Return the used flags whose fields are never read, here or elsewhere."""
    return {
        flag.name: target
        for flag in of
        if flag.kind is Kind.USED
        for target in flag.targets
        if target.partition(".")[0] in resolve.SUBJECTS and target not in read and target not in ELSEWHERE
    }


@pytest.mark.each_change
def test_every_field_that_a_used_flag_sets_is_read_when_a_model_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: hf_models.draw(name, tmp_path / name) for name in ("qwen3", "qwen3_moe")}
    read = set().union(*run_ranks(fields_read, 2, folders))
    assert never_read(flags.list_flags(), read) == {}
    assert not ELSEWHERE.keys() & read

    target = "ddp.gradient_reduce_div_fusion"
    planted = Flag(name="--divide-gradients-apart", targets=(target,), help="Nobody reads it.")
    everything = [*flags.list_script_flags(), planted]
    monkeypatch.setattr(flags, "list_script_flags", lambda: everything)
    assert never_read(flags.list_flags(), read) == {planted.name: target}
