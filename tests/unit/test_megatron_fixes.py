"""Fixes of megatron's distributed optimizer: a run that reloads a checkpoint equals one that never did."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

_NUM_STEPS = 3


def interrupted_and_uninterrupted(folder, fresh):
    """Return weights and step counts after further training: in one process without a stop, in the other reloaded."""
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model, optimizer = _model_and_optimizer()
    _train(model, optimizer, 0 if fresh else _NUM_STEPS)
    dist_checkpointing.save(_state(model, optimizer), folder)
    _train(model, optimizer, _NUM_STEPS)
    other_model, other_optimizer = _model_and_optimizer(seed=1)
    state = dist_checkpointing.load(_state(other_model, other_optimizer, is_loading=True), folder)
    other_model.module.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    _train(other_model, other_optimizer, _NUM_STEPS)
    return [_weights_and_steps(model, optimizer), _weights_and_steps(other_model, other_optimizer)]


@pytest.mark.parametrize("fresh", [False, True], ids=["after steps", "before the first step"])
def test_a_checkpoint_of_the_distributed_optimizer_continues_exactly(tmp_path, fresh):
    for (weights, steps), (other_weights, other_steps) in run_ranks(
        interrupted_and_uninterrupted, 2, str(tmp_path), fresh
    ):
        assert set(steps) == set(other_steps) == {_NUM_STEPS if fresh else 2 * _NUM_STEPS}
        for weight, other in zip(weights, other_weights, strict=True):
            assert torch.equal(weight, other)


def _model_and_optimizer(seed=0):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MegatronModule, TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)

    class Model(MegatronModule):
        def __init__(self):
            super().__init__(config)
            self.first = torch.nn.Linear(5, 7)
            self.second = torch.nn.Linear(7, 3)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(seed)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, Model())
    settings = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, clip_grad=0.0)
    return model, get_megatron_optimizer(settings, [model])


def _train(model, optimizer, num_steps):
    for step in range(num_steps):
        model.zero_grad_buffer()
        inputs = torch.sin(torch.arange(20.0).reshape(4, 5) + step)
        model(inputs).square().sum().backward()
        model.finish_grad_sync()
        optimizer.step()


def _state(model, optimizer, is_loading=False):
    state = {"model": model.module.sharded_state_dict()}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def _weights_and_steps(model, optimizer):
    inner = optimizer.chained_optimizers[0].optimizer
    steps = [int(state["step"]) for state in inner.state.values()]
    return [weight.detach().clone() for weight in model.parameters()], steps
