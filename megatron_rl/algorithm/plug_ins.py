"""User-defined losses, advantages, metrics and roles: FILE.py:NAME at --grpo-loss, --grpo-advantage and others.

The trainer runs a file (`code_files`) as its own code: unlike rewards, nothing confines it.

Letters: N targets, K responses of a group.
"""

import dataclasses
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl import code_files
from megatron_rl.algorithm.declaration import Advantage, Loss, LossRole, ScoredGroup, Surrogate, Targets
from megatron_rl.algorithm.library import ADVANTAGES, LOSSES
from megatron_rl.algorithm.roles import ROLES
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import InputError, UsageError
from megatron_rl.flag import names_function

LOSS, ADVANTAGE, METRIC, ROLE = "--grpo-loss", "--grpo-advantage", "--grpo-metric", "--grpo-role"
_ROLE_WORD = re.compile(r"(?P<source>[^=]+\.py:\w+)=(?P<folder>.+)")
# The parameters of each kind of function, for the errors.
_PARAMETERS = {LOSS: "targets, settings", ADVANTAGE: "group, settings", METRIC: "targets, settings"}


@dataclasses.dataclass(frozen=True)
class PlugIn:
    """A function of a user's file, as it was read."""

    flag: str
    source: str
    """FILE.py:FUNCTION, as the flag has it."""
    function: Callable[..., Any]
    sha256: str
    """The hash of the file's text."""

    @property
    def name(self) -> str:
        return self.source.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Return the flag and its value, for errors."""
        return f"{self.flag} {self.source}"


@dataclasses.dataclass(frozen=True)
class Metric:
    name: str
    compute: Callable[[Targets, Any], torch.Tensor]
    """Computes a value for each target; the mean over all tokens of the iteration is written."""


def find_loss(name: str) -> Loss:
    """Return the loss of this name, or of this FILE.py:FUNCTION; each call checks its first micro-batch again."""
    if name in LOSSES:
        return LOSSES[name]
    return Loss(name, "", _CheckedLoss(load(LOSS, name)))


def find_advantage(name: str) -> Advantage:
    """Return the advantage of this name, or of this FILE.py:FUNCTION."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    plug_in = load(ADVANTAGE, name)

    def compute(group: ScoredGroup, settings: Any) -> np.ndarray:
        return check_advantages(plug_in, plug_in.function(group, settings), len(group.rewards_K))

    return Advantage(name, "", compute)


def find_metrics(sources: Sequence[str]) -> list[Metric]:
    """Return the metrics of these FILE.py:FUNCTION, by the names of their functions."""
    plug_ins = [load(METRIC, source) for source in sources]
    for name, count in Counter(plug_in.name for plug_in in plug_ins).items():
        if count > 1:
            raise UsageError(f"{METRIC} names {count} functions {name}: give each a name of its own")
    return [Metric(plug_in.name, _CheckedMetric(plug_in)) for plug_in in plug_ins]


def find_roles(config: AlgorithmConfig) -> dict[str, LossRole]:
    """Return all roles by their names: the registry, and those of the user's files, each with its model's folder."""
    roles = dict(ROLES)
    for word in config.roles or ():
        role, _, folder = _load_role(word)
        if role.name in roles or not role.name.isidentifier():
            raise UsageError(f"{ROLE} {word}: the role is called {role.name!r}; give it another name, as of a variable")
        roles[role.name] = dataclasses.replace(role, flag=ROLE, find_models=functools.partial(_give, role.name, folder))
    return roles


def _give(name: str, folder: Path, config: Any) -> dict[str, Path]:
    return {name: folder}


def _load_role(word: str) -> tuple[LossRole, PlugIn, Path]:
    named = _ROLE_WORD.fullmatch(word)
    if named is None:
        raise UsageError(f"{ROLE} {word} must name a role and its model: write FILE.py:ROLE=FOLDER")
    code = code_files.load(ROLE, named["source"], "a role", "ROLE")
    if not isinstance(code.value, LossRole):
        raise UsageError(f"{ROLE} {named['source']} is not a role: give the file a LossRole of that name")
    plug_in = PlugIn(ROLE, named["source"], code.value.compute, code.sha256)
    return code.value, plug_in, Path(named["folder"])


def list_plug_ins(config: AlgorithmConfig) -> list[PlugIn]:
    """Load all functions that the settings name."""
    named = [(LOSS, config.loss), (ADVANTAGE, config.advantage), *((METRIC, source) for source in config.metrics or ())]
    functions = [load(flag, source) for flag, source in named if flag == METRIC or names_function(source)]
    return functions + [_load_role(word)[1] for word in config.roles or ()]


def describe_plug_ins(config: AlgorithmConfig) -> dict[str, str]:
    """Map each flag and function to the hash of its file, for records."""
    return {plug_in.label: plug_in.sha256 for plug_in in list_plug_ins(config)}


def compare_plug_ins(saved: Mapping[str, str], now: Mapping[str, str], source: str | Path) -> list[str]:
    """Return notes of the functions that the checkpoint `source` was not trained with, or was and this run is not.

    Raise an InputError if the file of a function has changed: a resumed run would be another run under the same flags.
    """
    for label in now:
        if saved.get(label, now[label]) != now[label]:
            raise InputError(
                f"{label}: the file has changed since {source} was saved (sha256 {saved[label][:12]}, now "
                f"{now[label][:12]}), so the run would resume as another run: restore the file, or give the new "
                "function a file of its own"
            )
    return [
        *(f"{source} was trained without {label}, which counts from here on" for label in now if label not in saved),
        *(f"{source} was trained with {label}, which this run leaves out" for label in saved if label not in now),
    ]


def check_agreement(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise an InputError unless all ranks have read the same files."""
    for rank, found in enumerate(of_ranks):
        for label, sha256 in found.items():
            if of_ranks[0].get(label) != sha256:
                raise InputError(
                    f"{label}: rank {rank} read another file than rank 0 (their sha256 differ): copy one file to all "
                    "hosts"
                )


def load(flag: str, source: str) -> PlugIn:
    """Run the file, and return its function; raise a UsageError if it cannot be one for this flag."""
    code = code_files.load(flag, source, "a function", "FUNCTION")
    if not callable(code.value):
        path, _, name = source.rpartition(":")
        of_file = vars(code.module).items()
        names = [key for key, value in of_file if inspect.isfunction(value) and not key.startswith("_")]
        raise UsageError(f"{flag} {source}: {path} has no function {name}; name one of {', '.join(names) or 'yours'}")
    _check_parameters(code.value, flag, source)
    return PlugIn(flag, source, code.value, code.sha256)


def check_losses(plug_in: PlugIn, answer: Any, targets: Targets) -> Surrogate:
    """Return the answer of a loss, or raise an InputError unless it has a floating-point number for each target."""
    surrogate = answer
    if isinstance(answer, torch.Tensor):
        surrogate = Surrogate(answer, targets.ratio_N.detach())
    if not isinstance(surrogate, Surrogate):
        raise InputError(
            f"{plug_in.label} returned {_describe(answer)}: return the losses of the targets, a tensor like "
            "targets.policy_N, or a Surrogate"
        )
    _check_values(plug_in, surrogate.loss_N, targets, "losses")
    return surrogate


def check_gradient(plug_in: PlugIn, surrogate: Surrogate, targets: Targets) -> torch.Tensor:
    """Return the gradient by the policy's log-probs; raise an InputError unless it and the losses are finite."""
    loss_N, policy_N = surrogate.loss_N, targets.policy_N
    gradient_N = None
    if loss_N.requires_grad:
        (gradient_N,) = torch.autograd.grad(loss_N.sum(), policy_N, retain_graph=True, allow_unused=True)
    if gradient_N is None:
        raise InputError(
            f"{plug_in.label}: its losses have no gradient by targets.policy_N, so nothing would be learned: compute "
            "them from targets.policy_N or targets.ratio_N, without detach"
        )
    for name, values_N in (("losses", loss_N.detach()), ("gradients by targets.policy_N", gradient_N)):
        if not values_N.isfinite().all():
            number = int((~values_N.isfinite()).sum())
            raise InputError(
                f"{plug_in.label}: {number} of {len(values_N)} {name} are not finite: bound the values that grow, such "
                "as the ratio"
            )
    return gradient_N


def check_advantages(plug_in: PlugIn, answer: Any, num_responses: int) -> np.ndarray:
    """Return the answer of an advantage, or raise an InputError unless it has a finite number for each response."""
    try:
        advantages_K = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"{plug_in.label} returned {_describe(answer)}: return an array like group.rewards_K"
        ) from None
    if advantages_K.shape != (num_responses,):
        raise InputError(
            f"{plug_in.label} returned an array of shape {advantages_K.shape}: return one number for each of the "
            f"{num_responses} responses, as in group.rewards_K"
        )
    if not np.isfinite(advantages_K).all():
        raise InputError(f"{plug_in.label} returned {advantages_K.tolist()}: every advantage must be finite")
    return advantages_K


def check_metric(plug_in: PlugIn, answer: Any, targets: Targets) -> torch.Tensor:
    """Return the answer of a metric, or raise an InputError unless it has a number for each target."""
    if not isinstance(answer, torch.Tensor):
        raise InputError(f"{plug_in.label} returned {_describe(answer)}: return a tensor like targets.policy_N")
    _check_values(plug_in, answer, targets, "values")
    return answer


class _CheckedLoss:
    """A loss whose every answer is checked for its shape, and the first one for its numbers and gradient."""

    def __init__(self, plug_in: PlugIn) -> None:
        self._plug_in = plug_in
        self._is_first = True

    def __call__(self, targets: Targets, settings: Any) -> Surrogate:
        surrogate = check_losses(self._plug_in, self._plug_in.function(targets, settings), targets)
        # An empty micro-batch shows nothing.
        if self._is_first and len(targets.policy_N):
            check_gradient(self._plug_in, surrogate, targets)
            self._is_first = False
        return surrogate


@dataclasses.dataclass(frozen=True)
class _CheckedMetric:
    """A metric whose every answer is checked for its shape."""

    plug_in: PlugIn

    def __call__(self, targets: Targets, settings: Any) -> torch.Tensor:
        return check_metric(self.plug_in, self.plug_in.function(targets, settings), targets)


def _check_parameters(function: Callable, flag: str, source: str) -> None:
    wanted = _PARAMETERS[flag]
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Functions in C may have none to be read; the trial calls them.
        return
    try:
        signature.bind(None, None)
    except TypeError:
        name = source.rpartition(":")[2]
        raise UsageError(
            f"{flag} {source} takes {signature}, and is called with ({wanted}): write def {name}({wanted})"
        ) from None


def _check_values(plug_in: PlugIn, values: torch.Tensor, targets: Targets, what: str) -> None:
    wanted = targets.policy_N.shape
    if values.shape != wanted or (what == "losses" and not values.is_floating_point()):
        raise InputError(
            f"{plug_in.label} returned {_describe(values)} for {len(targets.policy_N)} targets: return {what} of the "
            "shape of targets.policy_N, neither summed nor averaged; --grpo-aggregation adds them up"
        )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a value of type {type(value).__name__}"
