"""A model that is trained, described by flags as a run is, on the ranks of a test."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.command_line import parse as command_line
from megatron_rl.config.settings import Settings
from megatron_rl.trainer.mcore.checkpoint.checkpointer import Checkpointer
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, build_model, wrap
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.optimizer import UpdateResult, apply_update, build_optimizer, build_scheduler
from megatron_rl.trainer.mcore.step.policy import Base, Policy, build_base
from tests.distributed.layouts import Model, divisor, forward_backward, gather_reduced_shards
from tests.distributed.parity import shared_loss, shared_packs
from tests.nursery import platform_name

TP2, PP2, CP2 = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))
EP2, DISTRIBUTED = "--expert-model-parallel-size 2", "--use-distributed-optimizer"
OVERLAPPED = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
LAYOUTS = {
    "TP1": "",
    "TP2": TP2,
    "TP2+SP": f"{TP2} --sequence-parallel",
    "TP2+distopt": f"{TP2} {DISTRIBUTED}",
    "PP2": PP2,
    "PP2xVPP2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
    "DP2": "",
    "DP2+distopt": DISTRIBUTED,
    "DP2+overlap": OVERLAPPED,
    "CP2": CP2,
    "CP2+distopt": f"{CP2} {DISTRIBUTED}",
    "EP2": EP2,
    "EP2xCP2": f"{EP2} {CP2}",
    "TP2+SP,EP2,ETP1": f"{TP2} --sequence-parallel {EP2} --expert-tensor-parallel-size 1",
    "TP2xPP2": f"{TP2} {PP2}",
    "DP2xPP2": PP2,
    "DP2xCP2": CP2,
    "CP2xPP2": f"{CP2} {PP2}",
}
"""The flags of each layout."""
WORLD_SIZES = dict.fromkeys(LAYOUTS, 2) | dict.fromkeys(("TP2xPP2", "DP2xPP2", "DP2xCP2", "CP2xPP2"), 4) | {"TP1": 1}


@dataclasses.dataclass
class Training(Model):
    """One rank's part of the training."""

    settings: Settings
    optimizer: Any
    scheduler: Any
    base: Base | None = None

    @property
    def policy(self) -> Policy:
        return Policy(self.chunks, self.wrapped, self.optimizer, self.scheduler, self.weights, self.base)

    def accumulate(self) -> None:
        """Accumulate gradients of the parity test's packs."""
        forward_backward(self.wrapped, self.mine(shared_packs(divisor(self.session.sizes))), shared_loss)
        for chunk in self.wrapped:
            gather_reduced_shards(chunk)

    def update(self, scale: float = 0.01) -> UpdateResult:
        self.accumulate()
        return apply_update(self.optimizer, self.scheduler, self.wrapped, scale)


def settings_of(folder: Path, words: str) -> Settings:
    return command_line.parse(["--platform", platform_name(), "--hf-model", str(folder), *words.split()])


@contextlib.contextmanager
def training(folder: Path, words: str, num_updates: int = 10) -> Iterator[Training]:
    """Set up the training; torch.distributed must have been started; several of these may follow each other."""
    settings = settings_of(folder, words)
    with start_session(settings) as session:
        yield training_in(session, settings, num_updates)


def training_in(
    session: Session,
    settings: Settings,
    num_updates: int = 10,
    build_model: Callable[[Settings], list[PackedGPTModel]] = build_model,
) -> Training:
    chunks = build_model(settings)
    weights = ModelWeights(chunks, session)
    weights.load_hf(settings.model.hf_model)
    base = build_base(settings, session, chunks, weights)
    weights = weights if base is None else weights.merged_with(base.adapters)
    wrapped = wrap(chunks, settings.ddp)
    optimizer = build_optimizer(settings, wrapped)
    scheduler = build_scheduler(settings, optimizer, num_updates)
    return Training(session, settings.architecture, chunks, weights, wrapped, settings, optimizer, scheduler, base)


def checkpointer(trained: Training, **changes: Any) -> Checkpointer:
    config = dataclasses.replace(trained.settings.checkpoint, **changes)
    settings = dataclasses.replace(trained.settings, checkpoint=config)
    return Checkpointer(settings, trained.session, trained.policy)
