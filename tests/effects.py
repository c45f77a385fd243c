"""Everything that a command line's settings are built into, as plain values that can be compared.

For things that need process groups, files or other packages, the value is the call that would build them.
"""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.objective import Objective
from megatron_rl.command_line.parse import RunSettings
from megatron_rl.config.settings import Settings
from megatron_rl.observe import progress, sinks
from megatron_rl.trainer.loop import stop
from megatron_rl.trainer.loop.measures import Evaluator
from megatron_rl.trainer.loop.saver import is_save_due
from megatron_rl.trainer.mcore import session
from megatron_rl.trainer.mcore.checkpoint import checkpointer
from megatron_rl.trainer.mcore.model import gpt, rope
from megatron_rl.trainer.mcore.step import optimizer, roles

# This tells one stand-in from another of the same name.
_IDENTITY = re.compile(r" id='\d+'|0x[0-9a-f]+")
_NUM_VERSIONS = 8


def effect(settings: Settings, name: str) -> object:
    """Build one thing of the settings, named as "part.name", and return it as plain values."""
    part, _, field = name.partition(".")
    if part in ("transformer", "optimizer", "ddp"):
        return getattr(getattr(settings, part), field)
    return _PARTS[part](settings)[field]


def _process(settings: Settings) -> dict[str, object]:
    """Build the configuration, which also sets it for the process."""
    return {"reduced_precision": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction}


def _positions(settings: Settings) -> dict[str, object]:
    described = settings.architecture.rope
    frequencies = rope.inverse_frequencies(described, settings.architecture.kv_channels)
    return {"frequencies": frequencies.tolist(), "attention": rope.attention_factor(described)}


def _model(settings: Settings) -> dict[str, object]:
    """Return what a model is built of."""
    with (
        patch.object(gpt, "PackedGPTModel") as made,
        patch.object(gpt, "block_spec"),
        patch.object(gpt, "mark_tensor_parallel"),
        patch.object(gpt, "parallel_state"),
    ):
        gpt.build_model(settings)
    _, options = made.call_args
    names = ("vocab_size", "max_sequence_length", "share_embeddings_and_output_weights", "rotary_base")
    return {"stages": made.call_count} | {name: options[name] for name in names}


def _session(settings: Settings) -> dict[str, object]:
    with patch.object(session, "Session") as made:
        session.start_session(settings)
    sizes, platform, seed, timeout, waiting, _ = made.call_args.args
    return {"sizes": sizes, "platform": platform.name, "seed": seed, "timeout": timeout, "waiting": waiting}


def _making_of_optimizer(settings: Settings) -> dict[str, object]:
    with patch.object(optimizer, "get_megatron_optimizer") as made, patch.object(optimizer, "_connect"):
        made.return_value.chained_optimizers = ()
        optimizer.build_optimizer(settings, [])
    return dict(made.call_args.kwargs)


def _schedule(settings: Settings) -> dict[str, object]:
    if not isinstance(settings, RunSettings):
        return {}
    assert settings.training.train_iters is not None
    num_updates = settings.training.train_iters * settings.sizes.plan.num_updates
    groups: list[dict] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    with contextlib.redirect_stdout(io.StringIO()):
        schedule = optimizer.build_scheduler(settings, SimpleNamespace(param_groups=groups), num_updates)  # type: ignore[arg-type]
    rates, decays = [], []
    for _ in range(_NUM_VERSIONS + 1):
        rates.append(groups[0]["lr"])
        decays.append(groups[0]["weight_decay"])
        schedule.step(1)
    of_checkpoint = (schedule.override_opt_param_scheduler, schedule.use_checkpoint_opt_param_scheduler)
    return {"rates": rates, "decays": decays, "of_checkpoint": of_checkpoint}


def _roles(settings: Settings) -> dict[str, object]:
    made = roles.build_roles(settings, MagicMock(), MagicMock(), {}, 1)
    return {"temperature": made.temperature, "kind": type(made).__name__}


def _checkpoints(settings: Settings) -> dict[str, object]:
    """Return the calls that would save and load a checkpoint."""
    session = SimpleNamespace(
        rank=0,
        platform="cpu",
        run_or_raise_everywhere=lambda action: action(),
        broadcast=lambda item: item,
        gather=lambda item: [item],
    )
    calls = MagicMock()
    with (
        patch.object(checkpointer, "serialization", calls.serialization),
        patch.object(checkpointer, "state_dict", calls.state_dict),
        patch.object(checkpointer, "folders", calls.folders),
        patch.object(checkpointer, "AsyncCallsQueue", calls.queue),
    ):
        calls.serialization.find.return_value = (3, Path("iter_0000003"))
        # These are called if files exist.
        calls.serialization.prepare.side_effect = lambda state, *_: state() and MagicMock()
        calls.serialization.finish.side_effect = lambda session, prepared, action: action()
        calls.serialization.run_together.side_effect = lambda session, action, explain: action()
        calls.serialization.read_common.return_value = {"optimizer": {}, "opt_param_scheduler": {}, "megatron_rl": {}}
        calls.folders.holds_checkpoint.return_value = False
        calls.state_dict.has_rng_of_layout.return_value = True
        calls.folders.latest_iteration.return_value = None
        policy = MagicMock()
        policy.wrapped[0].ddp_config.use_distributed_optimizer = False
        made = checkpointer.Checkpointer(settings, session, policy)  # type: ignore[arg-type]
        due = [version for version in range(_NUM_VERSIONS + 1) if is_save_due(settings, version, is_last=False)]
        if settings.checkpoint.save is not None:
            made.save(2, {})
            made.finish()
        loaded = made.load()
    said = [_IDENTITY.sub("", str(call)) for call in calls.mock_calls]
    version = None if loaded is None else loaded.version
    return {"due": due, "calls": said, "version": version}


def _objective(settings: Settings) -> dict[str, object]:
    """Compute the loss of two targets whose ratios leave the clip range on either side, and whose engine differs."""
    old_N = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    policy_N = old_N + torch.tensor([0.4, -0.4, 0.26, -0.26])
    roles = RoleLogProbs(policy_N, old_N, {"reference": old_N - 0.5})
    advantages_N = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, _ = Objective(settings.algorithm, 8).loss(
        roles, old_N - 1.5, advantages_N, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    )
    return {"loss": loss.item()}


def _observed(settings: Settings) -> dict[str, object]:
    """Return lines for people, and the calls that would go to dashboards."""
    stream = io.StringIO()
    with patch.object(sinks, "_imported") as package:
        made = sinks.sinks_of(settings.observe, "run", 0, stream.write)
        made.close()
    shown = progress.progress_of(dataclasses.replace(settings.observe, progress="lines"), _NUM_VERSIONS, stream)
    for version in range(_NUM_VERSIONS):
        shown.end(version, {})
    return {"lines": stream.getvalue(), "dashboards": [_IDENTITY.sub("", str(call)) for call in package.mock_calls]}


def _evaluations(settings: Settings) -> dict[str, object]:
    evaluator = Evaluator(settings.evaluation.interval)
    return {"due": [version for version in range(_NUM_VERSIONS) if evaluator.is_due(version, is_last=False)]}


def _iteration(settings: Settings) -> dict[str, object]:
    assert isinstance(settings, RunSettings)
    assert settings.sidecar is not None
    return {"sizes": settings.sizes, "sidecar": settings.sidecar}


def _limits(settings: Settings) -> dict[str, object]:
    request = stop.StopRequest(1.0, lambda reason: None)
    course = stop.Course(0, _NUM_VERSIONS, request, settings.loop, lambda: 181.0)
    return {"ends": [course.is_over(version) for version in range(1, _NUM_VERSIONS)]}


_PARTS: dict[str, Callable[[Settings], dict[str, object]]] = {
    "process": _process,
    "positions": _positions,
    "model": _model,
    "session": _session,
    "making": _making_of_optimizer,
    "schedule": _schedule,
    "roles": _roles,
    "checkpoints": _checkpoints,
    "objective": _objective,
    "observed": _observed,
    "evaluations": _evaluations,
    "iteration": _iteration,
    "limits": _limits,
}
