"""Write a checkpoint as Megatron's own training script does and read it into our model, and the other way around."""

import sys
from pathlib import Path
from typing import Any

import torch

ARGUMENTS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --kv-channels 16 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 2 --lr 1e-3 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 10000 --qk-layernorm "
    "--transformer-impl local --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-swiglu-fusion "
    "--no-gradient-accumulation-fusion --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 131 --make-vocab-size-divisible-by 128 --tokenizer-type NullTokenizer --mock-data "
    "--distributed-backend gloo --ckpt-format torch_dist --norm-epsilon 1e-6"
)
OURS = "--platform cpu"


def write_and_read(folder: Path, tensor: int, pipeline: int) -> tuple[int, list[str]]:
    """Save with megatron.training, load with ours in the same layout; return the parameters that differ."""
    layout = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    stock = _write(folder, f"{ARGUMENTS} {layout} --save {folder} --save-interval 1")
    return _read(folder, layout, stock)


def write_ours(folder: Path, layout: str) -> list[tuple[int, str, dict[str, torch.Tensor]]]:
    """Save an optimizer that has stepped; return each rank's part of it."""
    from megatron_rl.trainer.mcore.checkpoint.checkpointer import Checkpointer
    from megatron_rl.trainer.mcore.model.gpt import build_model, wrap
    from megatron_rl.trainer.mcore.model.weights import ModelWeights
    from megatron_rl.trainer.mcore.session import start_session
    from megatron_rl.trainer.mcore.step.optimizer import build_optimizer, build_scheduler
    from megatron_rl.trainer.mcore.step.policy import Policy

    settings = _parse(f"{layout} --save {folder}")
    with start_session(settings) as session:
        chunks = build_model(settings)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.normal_()
        wrapped = wrap(chunks, settings.ddp)
        optimizer = build_optimizer(settings, wrapped)
        policy = Policy(
            chunks, wrapped, optimizer, build_scheduler(settings, optimizer, 2), ModelWeights(chunks, session)
        )
        torch.manual_seed(session.rank)
        for buffer in wrapped[0].buffers:
            buffer.grad_data.normal_()
        policy.update(1.0)
        policy.synchronize()
        Checkpointer(settings, session, policy).save(1, {})
        return _slices(chunks[0], optimizer)


def load_ours(folder: Path, layout: str) -> tuple[int, list[tuple[int, str, dict[str, torch.Tensor]]]]:
    """Load a checkpoint of ours with Megatron's `load_checkpoint`; return the iteration, and the rank's tensors."""
    words = f"{ARGUMENTS} {layout} --load {folder} --no-load-rng --use-checkpoint-opt-param-scheduler"
    model, optimizer, scheduler = _build_stock(words)
    from megatron.training.checkpointing import load_checkpoint

    iteration, _ = load_checkpoint(model, optimizer, scheduler)
    return iteration, _slices(_unwrap(model), optimizer)


def _parse(words: str) -> Any:
    """Parse the same arguments, as far as they are ours too."""
    from megatron_rl.command_line import parse as command_line

    described = ARGUMENTS.replace("--tokenizer-type NullTokenizer --mock-data", "")
    return command_line.parse(f"{OURS} {described} {words}".split())


def _unwrap(model: Any) -> torch.nn.Module:
    inner = model[0]
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def _slices(model: torch.nn.Module, optimizer: Any) -> list[tuple[int, str, dict[str, torch.Tensor]]]:
    """Return this rank's part of each parameter: where it begins, the parameter's name, and the optimizer's tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    (one,) = optimizer.chained_optimizers
    return [
        (
            ranges["param"].start,
            names[parameter],
            {
                name: values.detach().clone()
                for name, values in one._get_main_param_and_optimizer_states(parameter).items()
            },
        )
        for buffer in one.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    ]


def _write(folder: Path, words: str) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = _build_stock(words)
    from megatron.core import parallel_state
    from megatron.training.checkpointing import save_checkpoint

    save_checkpoint(1, model, optimizer, scheduler, 0)
    weights = {name: parameter.detach().clone() for name, parameter in _unwrap(model).named_parameters()}
    parallel_state.destroy_model_parallel()
    return weights


def _build_stock(words: str) -> tuple[Any, Any, Any]:
    """Build model, optimizer and scheduler as Megatron's training does."""
    sys.argv = ["pretrain_gpt.py", *words.split()]
    from megatron.core.datasets import utils

    # The wheel holds the compiled helpers and no Makefile to build them with.
    utils.compile_helpers = lambda: None
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import arguments as megatron_arguments
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    # With tensor parallelism, Megatron asks a CUDA device for this.
    megatron_arguments.get_device_arch_version = lambda: 10
    parse_and_validate_args()
    initialize_megatron(allow_no_cuda=True)
    arguments = get_args()

    def provide(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        config = core_transformer_config_from_args(arguments)
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        return GPTModel(
            config, spec, arguments.padded_vocab_size, 64, pre_process=pre_process, post_process=post_process,
            share_embeddings_and_output_weights=False, position_embedding_type="rope", pg_collection=pg_collection,
        )  # fmt: skip

    return setup_model_and_optimizer(ModelType.encoder_or_decoder, provide)


def _read(folder: Path, layout: str, stock: dict[str, torch.Tensor]) -> tuple[int, list[str]]:
    from megatron_rl.trainer.mcore.checkpoint.serialization import load_model
    from megatron_rl.trainer.mcore.model.gpt import build_model
    from megatron_rl.trainer.mcore.session import start_session

    settings = _parse(f"{layout} --load {folder}")
    with start_session(settings) as session:
        chunks = build_model(settings)
        iteration = load_model(chunks, folder, session)
        ours = dict(chunks[0].named_parameters())
        assert ours.keys() == stock.keys()
        return iteration, [name for name, values in stock.items() if not torch.equal(ours[name], values)]
