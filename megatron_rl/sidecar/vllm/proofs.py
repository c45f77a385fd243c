"""The part of our extension of vLLM's workers that proves loads.

Before a load changes a weight, names and shapes are compared with those of the checkpoint that the engine started from.
During the load, a record keeps what came, and digests of the parameters. After the load these are compared with the
digests that came with the weights (`held.py`), which also proves the files. A tensor that workers hold in parts is
proved by all of them together (`find_wrongly_shared`). Any other tensor that is not proved is digested as it came, by
one of the workers.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import find_left_out
from megatron_rl.shared.weights.files import Checkpoint
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.stored_forms import BLOCKS, split_stored
from megatron_rl.sidecar.vllm.derived import SOURCE, find_quantizing, find_stale, list_derived
from megatron_rl.sidecar.vllm.held import (
    InPlaceDigester,
    LoadProof,
    NotHeld,
    Order,
    compare,
    digesting,
    find_stale_derived,
    get_layer,
    without_layers_of,
)
from megatron_rl.sidecar.vllm.received import Record, Refusal, must_be_those_of

TIED = "lm_head.weight"
"""A tied output layer, which is one tensor in our exports and may be stored twice in a checkpoint."""


def keep_sources(
    weights: Iterable[tuple[str, torch.Tensor]], sources: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights, and keep a copy of those that other parameters are derived from."""
    for name, tensor in weights:
        if name.endswith(SOURCE):
            sources[name] = tensor.clone()
        yield name, tensor


def _name_plainly(parameter: str) -> str:
    return parameter.replace(".base_layer.", ".")


class LoadProver:
    """The base of `worker.WorkerExtension`; vLLM's worker owns `rank`, `vllm_config` and `model_runner`."""

    # Names and shapes of the tensors of the checkpoint that the engine started from; None until they are read.
    megatron_rl_wanted: dict[str, tuple[int, ...]] | None = None
    # The places of the tensors in the parameters; None until they are learned.
    megatron_rl_order: Order | None = None
    megatron_rl_digester: InPlaceDigester | None = None

    rank: int
    vllm_config: Any
    model_runner: Any

    def megatron_rl_check_complete(self, specs: list[TensorSpec]) -> None:
        """Check names and shapes against the checkpoint that this engine started from."""
        if self.megatron_rl_wanted is None:
            tensors = read_started_from(Path(self.vllm_config.model_config.model))
            self.megatron_rl_wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = self.megatron_rl_wanted
        given = {spec.name: spec.shape for spec in specs}
        if not wanted:
            return
        missing = sorted(wanted.keys() - given.keys() - {TIED})
        unknown = sorted(given.keys() - wanted.keys() - {TIED})
        other = sorted(name for name in wanted.keys() & given.keys() if wanted[name] != given[name])
        for names, what in ((missing, "missing"), (unknown, "not in this model"), (other, "of another shape")):
            if names:
                raise Refusal(f"{len(names)} tensors are {what}: {', '.join(names[:5])}")

    @contextlib.contextmanager
    def megatron_rl_recorded(self, with_digests: bool = False) -> Iterator[Record]:
        """Record the tensors that the model's `load_weights` gets, and the names that it reports as loaded."""
        model = self.model_runner.get_model()
        derived = list_derived(model)
        # vLLM reports a layer that adapters wrap by the name that it has without them.
        record = Record({_name_plainly(name) for name in self.megatron_rl_list_loaded(model)} - derived)
        sources: dict[str, torch.Tensor] = {}
        original = model.load_weights

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            noted = record.noted(weights, with_digests)
            loaded = original(keep_sources(noted, sources) if derived else noted, *args, **kwargs)
            record.loaded |= {_name_plainly(name) for name in loaded or ()}
            return loaded

        model.load_weights = load_weights
        try:
            if self.megatron_rl_order is None:
                yield record
            else:
                with digesting(model, self.megatron_rl_order, record.dtypes) as record.readings:
                    yield record
            # Only the whole load has ended with what vLLM derives.
            if sources and (stale := find_stale(model, sources, self.megatron_rl_find_tensor_rank())):
                raise Refusal(f"{len(stale)} parameters do not follow from the weights: {', '.join(stale[:5])}")
        finally:
            del model.load_weights

    def megatron_rl_list_loaded(self, model: torch.nn.Module) -> list[str]:
        """List the parameters that tensors are loaded into: all but those that layers make when they quantize."""
        order, quantizing = self.megatron_rl_order, find_quantizing(model)
        handed_over = frozenset() if order is None else order.handed_over
        names = [name for name, _ in model.named_parameters()]
        return [name for name in names if name in handed_over or get_layer(name) not in quantizing]

    def megatron_rl_find_tensor_rank(self) -> int:
        """Return this worker's rank among those that divide heads: vLLM numbers these first."""
        return self.rank % int(self.vllm_config.parallel_config.tensor_parallel_size)

    def megatron_rl_facts(self) -> dict[str, Any]:
        """Return everything that decides the order of weights beyond the names and shapes of tensors and parameters."""
        import vllm
        from vllm.platforms import current_platform

        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": current_platform.device_type,
            "rank": self.rank,
            "world_size": self.vllm_config.parallel_config.world_size,
        }

    def megatron_rl_digest_in_place(self, record: Record) -> None:
        """Digest the parameters after copies into them."""
        model, order = self.model_runner.get_model(), self.megatron_rl_order
        assert order is not None
        digester = self.megatron_rl_digester
        if digester is None or not digester.is_for(model, order, record.dtypes):
            digester = self.megatron_rl_digester = InPlaceDigester(model, order, record.dtypes)
        record.readings = digester.digest()
        record.is_in_place = True

    def megatron_rl_try_derived(self, record: Record) -> None:
        """Leave those layers unproved that do not quantize real weights by definition, though they did random ones."""
        if self.megatron_rl_order is not None and record.readings is not None and not record.is_in_place:
            stale = find_stale_derived(self.megatron_rl_order, record.readings)
            self.megatron_rl_order = without_layers_of(self.megatron_rl_order, stale)

    def megatron_rl_compared(self, record: Record, digests: Mapping[str, list[int]]) -> LoadProof:
        """Compare the parameters after a load with the given tensors; raise NotHeld if they differ."""
        if self.megatron_rl_order is None or record.readings is None:
            return LoadProof(0, len(record.parameters), tuple(sorted(record.parameters)), {}, (), frozenset())
        order = self.megatron_rl_order
        if record.is_in_place:
            order = dataclasses.replace(order, handed_over=frozenset())
        return compare(order, record.readings, digests, record.specs)

    def megatron_rl_prove_files(
        self, record: Record, received: Mapping[str, torch.Tensor], digests: Mapping[str, list[int]]
    ) -> LoadProof:
        """Compare the parameters with the digests of files, and digest files where a comparison proves nothing."""
        try:
            proof = self.megatron_rl_compared(record, digests)
        except NotHeld as error:
            # If the files are wrong, the model is not.
            must_be_those_of(received, digests, error.tensors)
            raise
        share = self.megatron_rl_pick_share(received)
        left = [name for name in share if name not in proof.proved and name not in proof.shares]
        must_be_those_of(received, digests, left)
        return proof

    def megatron_rl_pick_share(self, names: Iterable[str]) -> list[str]:
        """Pick this worker's share of the names: each belongs to one worker of the engine."""
        world_size = self.vllm_config.parallel_config.world_size
        return sorted(names)[self.rank % world_size :: world_size]


def describe_proof(proof: LoadProof, digests: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return what a worker answers about a load that is proved."""
    return {
        "compared": proof.num_compared,
        "parameters": proof.num_parameters,
        "uncompared": proof.uncompared,
        "shares": {name: {"whole": list(digests[name]), "parts": parts} for name, parts in proof.shares.items()},
        "unheld": [name for name in proof.unheld if name != TIED],
    }


def read_started_from(folder: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of the checkpoint that an engine started from; return none if it is in another format.

    Tensors that are not trained are left out, because none is published: they stay as vLLM loaded them, if it did.
    Experts that are stored together have their own tensors, as a trainer publishes them.
    """
    if not any(folder.glob("*.safetensors")):
        return {}
    with Checkpoint(folder) as checkpoint:
        names = checkpoint.names()
        if any(name.endswith(BLOCKS) for name in names):
            raise InputError(
                f"{folder} holds experts in MXFP4, and engines get weights in the dtype that is trained: "
                "start them from a folder of the model in bfloat16, as --stage sft saves one with --save-hf"
            )
        left_out = find_left_out(folder, names)
        stored = ((name, checkpoint.tensor(name)) for name in names if name not in left_out)
        return dict(part for one in stored for part in split_stored(*one))
