"""The states of the models that clients train, of which one at a time is in the chunks and their optimizer.

A state is what training changes: the trained parameters, the optimizer's own copies of them, its moments, and the sum
of the gradients since the last step. Invariants:

- a model that takes the place of another finds every bit of its own state, and none of the other's;
- gradients of several passes are added after each has been reduced over the ranks, never before.

States that are put aside are in the host's memory.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_rl.errors import InputError
from megatron_rl.tinker.work import Step
from megatron_rl.trainer.mcore.step.optimizer import UpdateResult, apply_update
from megatron_rl.trainer.mcore.step.policy import Policy


@dataclasses.dataclass
class ModelState:
    """A model's state while another one is in the chunks; of the one in the chunks, only the counts are valid."""

    num_steps: int = 0
    has_gradients: bool = False
    """Whether a pass has added gradients since the last step."""
    copies: "_Copies | None" = None


@dataclasses.dataclass(frozen=True)
class _Copies:
    weights: list[torch.Tensor]
    mains: list[torch.Tensor]
    moments: list[dict[Any, dict[str, Any]]]
    """The state of torch's optimizers, by parameter."""
    group_steps: list[Any]
    gradients: list[torch.Tensor]
    """The sums of gradients; empty if no pass has added any."""


class ModelStates:
    """The states of all models, and weights that were kept under names. Every rank calls each method."""

    def __init__(self, policy: Policy, seed: int) -> None:
        """Take over a policy that was just built; its weights are the base's, which every model starts from."""
        self._policy = policy
        self._states: dict[str, ModelState] = {}
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._live: str | None = None
        """The model that is in the chunks; None if other weights are."""
        if policy.base is not None:
            policy.base.adapters.initialize(seed)
        self._base = _save(self._list_weights())

    def create(self, name: str, seed: int) -> None:
        self._leave()
        self._states[name] = ModelState()
        self._begin(name)
        if self._policy.base is not None:
            self._policy.base.adapters.initialize(seed)
        self._policy.optimizer.reload_model_params()

    def use(self, name: str) -> ModelState:
        """Put a model into the chunks."""
        if name not in self._states:
            raise InputError(f"no model {name} exists: create it, or load it from a checkpoint")
        state = self._states[name]
        if self._live != name:
            self._leave()
            copies = state.copies
            assert copies is not None
            _copy(copies.weights, self._list_weights())
            _copy(copies.mains, self._list_mains())
            for inner, moments in zip(self._list_inner(), copies.moments, strict=True):
                inner.state = type(inner.state)(dict)
                for parameter, values in moments.items():
                    inner.state[parameter] = _move(values, parameter.device)
            for group, steps in zip(self._list_groups(), copies.group_steps, strict=True):
                group.pop("step", None)
                group |= {} if steps is None else {"step": steps}
            self._clear_gradients()
            if copies.gradients:
                _copy(copies.gradients, self._list_gradients())
            state.copies = None
            self._live = name
        return state

    def keep(self, name: str) -> None:
        """Keep a copy of the weights in the chunks, in the host's memory."""
        self._policy.synchronize()
        self._kept[name] = _save(self._list_weights())

    def are_finite(self) -> bool:
        """Check this rank's weights in the chunks."""
        return all(bool(one.isfinite().all()) for one in self._list_weights())

    def show_kept(self, name: str | None) -> None:
        """Put weights that were kept, or the base's, into the chunks, to be read and computed with."""
        if name is not None and name not in self._kept:
            raise InputError(f"the weights {name} are not kept any more: save them again")
        self._leave()
        _copy(self._base if name is None else self._kept[name], self._list_weights())

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._kept.pop(name, None)
            self._states.pop(name, None)
            if self._live == name:
                self._live = None

    def add_pass(self, state: ModelState, run: Any) -> Any:
        """Call `run`, which fills the gradient buffers, and add to them what earlier passes have left there."""
        before = [one.clone() for one in self._list_gradients()] if state.has_gradients else None
        self._clear_gradients()
        result = run()
        if before is not None:
            for buffer, earlier in zip(self._list_gradients(), before, strict=True):
                buffer += earlier
        state.has_gradients = True
        return result

    def step(self, state: ModelState, step: Step) -> UpdateResult:
        """Step as torch's AdamW does, with every parameter decayed."""
        optimizer = self._policy.optimizer
        for one in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
            one.config.clip_grad = step.clip
        for group in self._list_groups():
            group["lr"], group["weight_decay"] = step.learning_rate, step.weight_decay
            group["betas"], group["eps"] = (step.beta1, step.beta2), step.epsilon
        state.has_gradients = False
        try:
            result = apply_update(optimizer, self._policy.scheduler, self._policy.wrapped, 1.0)
        finally:
            self._clear_gradients()
        state.num_steps += result.was_taken
        return result

    def adopt(self, name: str, num_steps: int) -> None:
        """Note that the model in the chunks was loaded from a checkpoint."""
        self._states[name] = ModelState(num_steps=num_steps)
        self._live = name
        self._clear_gradients()

    def leave_room(self) -> None:
        """Make the chunks free for a checkpoint: their model is put aside, and the optimizer is as new."""
        self._leave()
        # A model that was forgotten may have left its own.
        self._reset_optimizer()

    def _begin(self, name: str) -> None:
        """Put the base's weights and an optimizer as new into the chunks, for this model."""
        _copy(self._base, self._list_weights())
        self._reset_optimizer()
        self._live = name

    def _reset_optimizer(self) -> None:
        for inner in self._list_inner():
            inner.state = type(inner.state)(dict)
        for group in self._list_groups():
            group.pop("step", None)
        self._clear_gradients()

    def _leave(self) -> None:
        """Put the model in the chunks aside."""
        if self._live is None:
            return
        state = self._states[self._live]
        self._policy.synchronize()
        cpu = torch.device("cpu")
        state.copies = _Copies(
            weights=_save(self._list_weights()),
            mains=_save(self._list_mains()),
            moments=[
                {parameter: _move(values, cpu) for parameter, values in inner.state.items()}
                for inner in self._list_inner()
            ],
            group_steps=[group.get("step") for group in self._list_groups()],
            gradients=_save(self._list_gradients()) if state.has_gradients else [],
        )
        self._reset_optimizer()
        self._live = None

    def _clear_gradients(self) -> None:
        for chunk in self._policy.wrapped:
            chunk.zero_grad_buffer()
        self._policy.optimizer.zero_grad()

    def _list_weights(self) -> list[torch.Tensor]:
        return [one.data for chunk in self._policy.wrapped for one in chunk.parameters() if one.requires_grad]

    def _list_inner(self) -> list[Any]:
        """List torch's optimizers in Megatron's."""
        optimizer = self._policy.optimizer
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        return [one.optimizer for one in chained if one.optimizer is not None]

    def _list_groups(self) -> Iterator[dict[str, Any]]:
        for inner in self._list_inner():
            yield from inner.param_groups

    def _list_mains(self) -> list[torch.Tensor]:
        """List the optimizer's copies of parameters; where it has none, it steps the parameters themselves."""
        own = {id(one) for chunk in self._policy.wrapped for one in chunk.parameters()}
        return [one.data for group in self._list_groups() for one in group["params"] if id(one) not in own]

    def _list_gradients(self) -> list[torch.Tensor]:
        return [
            buffer.grad_data
            for chunk in self._policy.wrapped
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]


def _save(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one.to("cpu", copy=True) for one in tensors]


def _move(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move an optimizer's tensors; their counts of steps are on the host anyway."""
    return {name: one.to(device) if torch.is_tensor(one) and one.dim() else one for name, one in values.items()}


@torch.no_grad()
def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for value, place in zip(source, target, strict=True):
        place.copy_(value)
