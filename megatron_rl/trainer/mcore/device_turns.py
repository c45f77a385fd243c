"""Turns of ranks and engines on the same devices (--rollout-colocate sleep).

A rank that leaves its device copies what it trains to the host, and gives the memory back. Tensors stay the same
objects: their storages are emptied, and filled again in other memory. On a CPU they are overwritten. Invariants:

- a rank leaves only when the published weights and the log-probs of their probe are on the host;
- engines load nothing before all ranks have left, and a rank takes nothing back before all engines sleep;
- after a turn every tensor has the bits from before. Gradients are zero then, and are not copied.

Its libraries' own buffers stay on the device, and so do adapters from before an iteration's first update.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_rl.platforms import Platform
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.policy import Trainable

_log = logging.getLogger(__name__)


class DeviceTurns:
    """The tensors of this rank that leave its device. Every rank calls each method."""

    def __init__(self, session: Session, trained: Sequence[Trainable], frozen: Iterable[torch.nn.Module]) -> None:
        """Move what is `trained`, with gradients and optimizers, and `frozen` chunks."""
        self._session = session
        self._platform: Platform = session.platform
        self._trained = trained
        self._frozen = list(frozen)
        self._away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        """The emptied storages: their bytes, and the copy of these on the host; None if they are zero."""
        self._buffers: dict[int, torch.Tensor] = {}
        """Memory of the host for each storage, kept for the next turn."""

    def leave(self) -> None:
        """Copy everything to the host, and give the device's memory back; return once all ranks have."""
        self._session.run_or_raise_everywhere(self._leave)

    def come_back(self) -> None:
        """Take the device's memory again, and copy everything back."""
        self._session.run_or_raise_everywhere(self._come_back)

    def _leave(self) -> None:
        assert not self._away, "the rank has left its device already"
        kept = {_identify(tensor): tensor.untyped_storage() for tensor in self._pick(self._list_kept())}
        zero = {_identify(tensor): tensor.untyped_storage() for tensor in self._pick(self._list_gradients())}
        for identity, storage in {**kept, **zero}.items():
            copy = None
            if identity in kept:
                copy = self._find_buffer(storage)
                copy.copy_(_view(storage), non_blocking=True)
            self._away.append((storage, storage.nbytes(), copy))
        self._platform.synchronize()
        for storage, _, _ in self._away:
            _empty(storage)
        self._platform.release_memory()

    def _find_buffer(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return memory of the host for a storage, whose object stays the same from turn to turn.

        It is not torch's memory for copies, which has a power of two of bytes.
        """
        key = storage._cdata
        known = self._buffers.get(key)
        if known is not None and len(known) != storage.nbytes():
            # Another storage is where one was that has been freed.
            self._platform.page_unlock(self._buffers.pop(key))
        if key not in self._buffers:
            self._buffers[key] = torch.empty(storage.nbytes(), dtype=torch.uint8)
            if reason := self._platform.page_lock(self._buffers[key]):
                _log.warning("copies to and from the host are slow: %s", reason)
        return self._buffers[key]

    def _come_back(self) -> None:
        for storage, size, copy in self._away:
            if storage.nbytes() != size:
                storage.resize_(size)
            if copy is None:
                _view(storage).zero_()
            else:
                _view(storage).copy_(copy, non_blocking=True)
        self._platform.synchronize()
        self._away = []

    def _list_gradients(self) -> Iterator[torch.Tensor]:
        for one in self._trained:
            for chunk in one.wrapped:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    yield buffer.grad_data

    def _pick(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Pick the tensors that have memory of the device."""
        device = self._session.device.type
        return (tensor for tensor in tensors if tensor.device.type == device and tensor.untyped_storage().nbytes())

    def _list_kept(self) -> Iterator[torch.Tensor]:
        """List all tensors but gradients; some have a storage in common."""
        for one in self._trained:
            for chunk in one.wrapped:
                yield from _list_of_module(chunk)
            yield from _list_of_optimizer(one.optimizer)
        for chunk in self._frozen:
            yield from _list_of_module(chunk)


def _list_of_module(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (parameter.data for parameter in module.parameters())
    yield from torch.nn.Module.buffers(module)


def _list_of_optimizer(optimizer: Any) -> Iterator[torch.Tensor]:
    """List the main parameters and the state of Megatron's optimizer, which may consist of several."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        if inner is None:
            # None of its parameters are on this rank.
            continue
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        yield from _list_of_value(list(inner.state.values()))


def _list_of_value(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _list_of_value(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _list_of_value(item)


def _identify(tensor: torch.Tensor) -> int:
    """Identify a tensor's storage, which has memory."""
    return tensor.untyped_storage().data_ptr()


def _empty(storage: torch.UntypedStorage) -> None:
    """Give the memory of a storage back. On a host, where NumPy may still know its place, overwrite it with NaN."""
    if storage.device.type == "cpu":
        _view(storage).fill_(255)
    else:
        storage.resize_(0)


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
