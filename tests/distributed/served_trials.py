"""Do the work of a service's clients on the ranks of a test, without a front and without engines."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.tinker import work
from megatron_rl.tinker.worker import Worker
from megatron_rl.trainer.loop.stop import StopRequest
from megatron_rl.trainer.mcore.session import start_session
from megatron_rl.trainer.mcore.step.policy import build_policy
from tests.distributed.layouts import Model, gather_reduced_shards
from tests.distributed.training import settings_of
from tests.supervised_twin import Tensors

WORDS = "--stage serve --seq-length 40 --micro-batch-size 2"
MOST_TOKENS = 40


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model, a layout, and pieces of work; each None notes gradients and weights of what is in the chunks."""

    folder: Path
    layout: str
    work: Sequence[work.Work | None]


@dataclasses.dataclass(frozen=True)
class Noted:
    gradients: Tensors
    weights: Tensors
    num_bytes: int
    """The bytes of the models that are put aside, of their base, and of weights that are kept."""


def run_trials(trials: Mapping[str, Trial]) -> dict[str, list[work.Result | Noted]]:
    torch.distributed.init_process_group("gloo")
    return {name: _run(trial) for name, trial in trials.items()}


def _run(trial: Trial) -> list[work.Result | Noted]:
    settings = settings_of(trial.folder, f"{trial.layout} {WORDS}")
    settings.optimizer.lr = 1e-4
    nothing: Any = None
    with start_session(settings) as session:
        policy = build_policy(settings, session, 1)
        model = Model(session, settings.architecture, policy.chunks, policy.weights, policy.wrapped)
        stop = StopRequest(1.0, lambda error: None)
        worker = Worker(settings, session, policy, nothing, nothing, stop, MOST_TOKENS)
        found: list[work.Result | Noted] = []
        for piece in trial.work:
            if piece is not None:
                found.append(worker.do(piece))
                continue
            policy.synchronize()
            for chunk in policy.wrapped:
                gather_reduced_shards(chunk)
            if policy.base is None:
                found.append(Noted(model.gradients(), model.parameters(), _count_bytes(worker)))
            else:
                own = {
                    f"{session.rank} {number}": one.parameter for number, one in enumerate(policy.base.adapters.shards)
                }
                weights = {name: one.detach().clone() for name, one in own.items()}
                found.append(Noted({}, weights, _count_bytes(worker)))
        return found


def _count_bytes(worker: Worker) -> int:
    states = worker._states
    copies = [one.copies for one in states._states.values() if one.copies is not None]
    tensors = [one for copy in copies for one in (*copy.weights, *copy.mains, *copy.gradients)]
    for copy in copies:
        tensors += [one for of_inner in copy.moments for values in of_inner.values() for one in values.values()]
    tensors += [one for weights in (states._base, *states._kept.values()) for one in weights]
    # A parameter's count of steps is a number.
    return sum(one.nbytes for one in tensors if one.dim())
