"""The model of a worker: the one place that loads weights into it, proves them, and knows which weights it holds.

Weights come in files, in the memory of the trainer's devices, or in a stream that vLLM's own transfer engine receives.
On some devices files and offered memory are copied into the parameters in place (`in_place.py`). Anything else is
loaded by vLLM.

Before a load changes a weight, names and shapes are compared with those of the checkpoint that the engine started from.
During the load, a record keeps what came, and digests of the parameters. After the load these are compared with the
digests that came with the weights (`held.py`), which also proves the files. A tensor that workers hold in parts is
proved by all of them together (`answers.find_wrongly_shared`). Any other tensor that is not proved is digested as it
came, by one of the workers.

If a load breaks off in the model, the model is torn, and holds nothing from then on.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl import platforms
from megatron_rl.platforms.platform import CannotShare, DeviceSharing
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import Checkpoint, read_digests
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import Mapping as WeightMapping
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import Offer, taken
from megatron_rl.sidecar.vllm.adapters import AdapterSlot
from megatron_rl.sidecar.vllm.derived import find_quantizing, find_stale
from megatron_rl.sidecar.vllm.held import (
    InPlaceDigester,
    LoadProof,
    NotHeld,
    Order,
    compare,
    find_stale_derived,
    get_layer,
    join_proofs,
    without_layers_of,
)
from megatron_rl.sidecar.vllm.in_place import (
    OpenedMemory,
    OpenedOffer,
    Places,
    describe,
    find_misfits,
    find_obstacles,
    find_unheld,
)
from megatron_rl.sidecar.vllm.learned_order import list_facts, recall_or_learn
from megatron_rl.sidecar.vllm.patches import pack_tied_layers
from megatron_rl.sidecar.vllm.received import (
    Maps,
    Record,
    Refusal,
    arriving,
    list_specs,
    map_file_tensors,
    must_be_announced,
    must_be_complete,
    must_be_private,
    must_be_those_of,
    read_started_from,
    recording,
)
from megatron_rl.sidecar.vllm.sleeping import Part, Sleep

Answer = dict[str, Any]
Weights = Iterable[tuple[str, torch.Tensor]]


class HeldModel:
    """The model that a worker computes with, and what is proved about its weights."""

    in_place_on: tuple[str, ...] = ("cuda",)
    """The types of devices on which files are copied in place."""

    def __init__(self, worker: Any) -> None:
        """Begin with what vLLM's worker has loaded."""
        self.order: Order | None = None
        """The places of the tensors in the parameters; None until they are learned."""
        self.obstacles: tuple[str, ...] = ("the order of its parameters was not learned at its start",)
        """The reasons why vLLM loads weights although the device would allow copies; empty if it does not."""
        self.memory: OpenedMemory | None = None
        """The memory of the trainer's devices; None until it is offered."""
        self.maps: Maps | None = None
        self.slot: AdapterSlot | None = None
        self._worker = worker
        self._sleep = Sleep(worker)
        self._fingerprint = ""
        self._is_torn = False
        # Names and shapes of the tensors of the checkpoint that the engine started from; None until they are read.
        self._wanted: dict[str, tuple[int, ...]] | None = None
        self._digester: InPlaceDigester | None = None
        self._stream: tuple[contextlib.ExitStack, Record] | None = None
        # The fingerprint of the base that was loaded and compared; empty before, and once all workers together refute
        # it. Then its proof, and digests of the tensors that are left for all workers together to prove.
        self._base = ""
        self._base_proof: tuple[LoadProof, dict[str, list[int]]]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights that it holds; empty if none are proved, or a load failed half-way."""
        return "" if self._is_torn else self._fingerprint

    @property
    def tensor_rank(self) -> int:
        """This worker's rank among those that divide heads: vLLM numbers these first."""
        return self._worker.rank % int(self._config.parallel_config.tensor_parallel_size)

    def load(self, folder: Path, user: int, expected: str, base: str = "", number: int = 0) -> Answer:
        """Load the weights in a folder, if they have the announced fingerprint and no tensor is missing.

        They are copied from the trainer's devices if these are offered and can be opened, and else from files. With the
        fingerprint of a base, they are adapters on it, which requests name by the number.
        """
        must_be_private(folder, user)
        digests = read_digests(folder)
        if base:
            return {**self.load_adapters(folder, digests, expected, base, number), "through": "files", "reasons": []}
        reasons: Sequence[str] = ()
        with taken(folder) as offer:
            if offer is not None:
                opened, reasons = self._open(offer)
                if opened is not None:
                    return {**self.load_offered(opened, digests, expected), "through": "ipc", "reasons": []}
        return {**self.load_files(folder, digests, expected), "through": "files", "reasons": list(reasons)}

    def load_files(self, folder: Path, digests: Mapping[str, list[int]], expected: str) -> Answer:
        """Load the tensors in a folder's files, each once it has arrived."""
        received = self.map_files(folder)
        specs = list_specs(received)
        self._must_be_as_announced(specs, digests, expected)
        self.learn(specs)
        with arriving(folder, received, specs) as tensors:
            obstacles = self._find_obstacles(specs)
            record = self.replace_weights(tensors, not obstacles)
        proof = self._prove_files(record, received, digests)
        return self._hold(expected, proof, digests, obstacles)

    def load_offered(self, opened: OpenedOffer, digests: Mapping[str, list[int]], expected: str) -> Answer:
        """Copy weights from the trainer's devices, and compare the parameters with the digests that came."""
        assert self.memory is not None
        specs = list(opened.specs)
        self._must_be_as_announced(specs, digests, expected)
        self._fingerprint = ""
        with self._loading(), self._copying() as (record, places):
            for spec in specs:
                record.note(spec)
            self.memory.copy(opened, places)
        try:
            proof = self.compare(record, digests)
        except NotHeld as error:
            text = f"{error} (they were copied from the trainer's devices; --publish-through files takes files)"
            raise NotHeld(text, error.tensors) from None
        return self._hold(expected, proof, digests)

    def load_adapters(
        self, folder: Path, digests: Mapping[str, list[int]], expected: str, base: str, number: int
    ) -> Answer:
        """Put the adapters in a folder's files into the slot that requests name by the number, and prove both parts."""
        self._fingerprint = ""
        slot = self.slot = self.slot or AdapterSlot(self._worker.model_runner)
        received = self.map_files(folder)
        specs = list_specs(received)
        must_be_announced(specs, digests, expected, base)
        of_base, shared = self._prove_base(base, specs[0].dtype)
        with arriving(folder, received, specs) as tensors:
            factors = dict(tensors)
        slot.put(number, factors)
        try:
            proof = slot.prove(specs, digests)
        except NotHeld as error:
            # If the files are wrong, the slot is not.
            must_be_those_of(received, digests, error.tensors)
            raise
        return self._hold(expected, join_proofs(of_base, proof), {**shared, **digests})

    def sleep(self) -> None:
        """Give the device away, with all that the model holds."""
        self._must_be_whole()
        self._end_recording()
        self._fingerprint = ""
        self.forget_base()
        self._sleep.begin()

    def wake(self, part: Part) -> None:
        """Get a part of the device's memory back; nothing is held before the next load."""
        self._sleep.end(part)
        if part == "weights" and getattr(self._worker.model_runner, "lora_manager", None) is not None:
            self.slot = self.slot or AdapterSlot(self._worker.model_runner)
            self.slot.wipe()

    def forget_base(self) -> None:
        """Hold no adapters, because the base changes."""
        self._base = ""
        if self.slot is not None:
            self.slot.clear()

    def check_files(self, folder: Path, names: Sequence[str]) -> None:
        """Refuse files of which these tensors, which the workers hold wrongly, do not match their digests.

        Those of a base that engines keep are in no file: the base is loaded again with the next adapters.
        """
        received, digests = map_file_tensors(folder), read_digests(folder)
        if set(names) - received.keys():
            self.forget_base()
        must_be_those_of(received, digests, self._pick_share(received.keys() & set(names)))

    def begin_stream(self) -> None:
        """Digest all tensors that vLLM's own transfer engine passes to the model, before they are loaded."""
        self._end_recording()
        self._must_be_whole()
        self._is_torn = True
        self._fingerprint = ""
        stack = contextlib.ExitStack()
        self._stream = stack, stack.enter_context(self._recording(with_digests=True))

    def end_stream(self, expected: str) -> Answer:
        """Check that all of the announced weights arrived."""
        if self._stream is None:
            raise Refusal("no stream was begun")
        _, record = self._stream
        with torch.no_grad():
            pack_tied_layers(self._model)
        self._end_recording()
        digests = record.read_digests()
        self._must_be_as_announced(record.specs, digests, expected)
        record.check_all_loaded()
        self._is_torn = False
        return self._hold(expected, self.compare(record, digests), digests)

    def learn_order(self) -> None:
        """Learn the places of tensors in the parameters, if the engine's checkpoint lists the tensors.

        The model holds no real weights afterwards.
        """
        specs = list_specs(read_started_from(self._checkpoint))
        if specs:
            self.learn(specs)
            self.obstacles = self._list_obstacles(specs)

    def learn(self, specs: list[TensorSpec]) -> None:
        """Learn the places of tensors; once is enough, because they do not change."""
        if self.order is not None:
            return
        self._fingerprint = ""
        with self._loading():
            self.order = recall_or_learn(
                self._model,
                specs,
                self._config.model_config.dtype,
                lambda tensors: self.reload(tensors.items()),
                list_facts(self._worker.rank, self._config.parallel_config.world_size),
            )

    def reload_checkpoint(self, is_by_vllm: bool) -> bool:
        """Replace the weights by those of the checkpoint that the engine started from; return False if it cannot.

        They are copied in place if they can be. Only the rules of quantization are tried again.
        """
        tensors = read_started_from(self._checkpoint)
        if tensors:
            record = self.replace_weights(tensors.items(), not (is_by_vllm or self.obstacles))
            self.try_derived(record)
        return bool(tensors)

    def replace_weights(self, tensors: Weights, is_in_place: bool) -> Record:
        self._fingerprint = ""
        self.forget_base()
        with self._loading():
            if is_in_place:
                return self.copy(tensors)
            with self._recording() as record:
                self.reload(tensors)
                record.check_all_loaded()
            return record

    def copy(self, tensors: Weights) -> Record:
        """Copy tensors into the parameters in place.

        Unlike vLLM's reload this clears no cache of encoders, since an engine of ours has none.
        """
        with self._copying() as (record, places):
            for name, tensor in record.noted(tensors, with_digests=False):
                places.put(name, tensor)
        return record

    def reload(self, tensors: Weights) -> None:
        """Have vLLM load tensors."""
        self._worker.reload_weights(weights_iterator=iter(tensors))
        pack_tied_layers(self._model)

    def map_files(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """Map the tensors of a folder's files."""
        if self.maps is None:
            self.maps = Maps(platforms.select("cuda") if self._device.type == "cuda" else None)
        return self.maps.find(folder)

    def find_sharing(self) -> DeviceSharing | None:
        """Return how this worker opens the memory of other processes' devices; None if it cannot."""
        return platforms.select("cuda").device_sharing() if self._device.type == "cuda" else None

    def check_complete(self, specs: list[TensorSpec]) -> None:
        """Check names and shapes against the checkpoint that this engine started from."""
        if self._wanted is None:
            tensors = read_started_from(self._checkpoint)
            self._wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        must_be_complete(specs, self._wanted)

    def list_loaded(self) -> list[str]:
        """List the parameters that tensors are loaded into: all but those that layers make when they quantize."""
        quantizing = find_quantizing(self._model)
        handed_over = frozenset() if self.order is None else self.order.handed_over
        names = [name for name, _ in self._model.named_parameters()]
        return [name for name in names if name in handed_over or get_layer(name) not in quantizing]

    def try_derived(self, record: Record) -> None:
        """Leave those layers unproved that do not quantize real weights by definition, though they did random ones."""
        if self.order is not None and record.readings is not None and not record.is_in_place:
            self.order = without_layers_of(self.order, find_stale_derived(self.order, record.readings))

    def digest_in_place(self, record: Record) -> None:
        """Digest the parameters after copies into them."""
        assert self.order is not None
        digester = self._digester
        if digester is None or not digester.is_for(self._model, self.order, record.dtypes):
            digester = self._digester = InPlaceDigester(self._model, self.order, record.dtypes)
        record.readings = digester.digest()
        record.is_in_place = True

    def compare(self, record: Record, digests: Mapping[str, list[int]]) -> LoadProof:
        """Compare the parameters after a load with the given tensors; raise NotHeld if they differ."""
        if self.order is None or record.readings is None:
            return LoadProof(0, len(record.parameters), tuple(sorted(record.parameters)), {}, (), frozenset())
        order = dataclasses.replace(self.order, handed_over=frozenset()) if record.is_in_place else self.order
        return compare(order, record.readings, digests, record.specs)

    def _must_be_as_announced(self, specs: list[TensorSpec], digests: Mapping[str, list[int]], expected: str) -> None:
        must_be_announced(specs, digests, expected)
        self.check_complete(specs)

    def _hold(
        self, expected: str, proof: LoadProof, digests: Mapping[str, list[int]], obstacles: Sequence[str] = ()
    ) -> Answer:
        """Note the weights that are proved; return the answer about their load."""
        self._fingerprint = expected
        return {"fingerprint": expected, "obstacles": list(obstacles), **proof.describe(digests)}

    def _open(self, offer: Offer) -> tuple[OpenedOffer | None, Sequence[str]]:
        """Open the memory that is offered; if this worker must read files instead, return the reasons."""
        sharing = self.find_sharing()
        if sharing is None:
            return None, ["the engine's device type has no memory that processes share"]
        if self.obstacles or self.order is None:
            return None, ["the engine does not copy weights in place"]
        if self.memory is None:
            self.memory = OpenedMemory(sharing)
        try:
            opened = self.memory.open(offer)
        except CannotShare as refusal:
            return None, [str(refusal)]
        specs = list(opened.specs)
        unheld = find_unheld(self.order, specs)
        # A worker would have to digest these.
        reasons = [*self._find_obstacles(specs), *describe([(unheld, "tensors are held by other workers")])]
        return None if reasons else opened, reasons

    @contextlib.contextmanager
    def _copying(self) -> Iterator[tuple[Record, Places]]:
        """Copy tensors in this context; then wait for the copies, and digest the parameters."""
        assert self.order is not None
        record, places = Record(set(self.order.rows)), Places(self._model, self.order)
        yield record, places
        places.wait()
        self.digest_in_place(record)

    @contextlib.contextmanager
    def _recording(self, with_digests: bool = False) -> Iterator[Record]:
        """Record a load by vLLM in this context; then check the parameters that vLLM derives from others."""
        with recording(self._model, self.order, self.list_loaded(), with_digests) as record:
            yield record
            if record.sources and (stale := find_stale(self._model, record.sources, self.tensor_rank)):
                raise Refusal(f"{len(stale)} parameters do not follow from the weights: {', '.join(stale[:5])}")

    def _prove_base(self, base: str, dtype: str) -> tuple[LoadProof, dict[str, list[int]]]:
        """Prove once that the parameters hold the base, by loading the engine's own checkpoint.

        Return the proof, and digests of the tensors that it leaves for all workers together to prove. Each answer has
        these, because a worker does not learn whether the others' parts were compared with its own.
        """
        if self._base == base:
            return self._base_proof
        folder = self._checkpoint
        mapping = WeightMapping(read_architecture(folder))
        digests: dict[str, list[int]] = {}
        with Checkpoint(folder) as checkpoint:
            checkpoint.check(mapping)
            specs = mapping.manifest(dtype)

            def read() -> Iterator[tuple[str, torch.Tensor]]:
                for spec in specs:
                    tensor = checkpoint.tensor(spec.name).to(DTYPES[spec.dtype])
                    digests[spec.name] = digest(tensor).tolist()
                    yield spec.name, tensor

            record = self.replace_weights(read(), not self._find_obstacles(specs))
        found = compute_fingerprint(specs, digests)
        if found != base:
            raise Refusal(
                f"{folder}, which the engine started from, has fingerprint {found[:12]}, and the adapters' base has "
                f"{base[:12]}: start engines from the trainer's --hf-model"
            )
        proof = self.compare(record, digests)
        self._base_proof = proof, {name: digests[name] for name in proof.shares}
        self._base = base
        return self._base_proof

    def _prove_files(
        self, record: Record, received: Mapping[str, torch.Tensor], digests: Mapping[str, list[int]]
    ) -> LoadProof:
        """Compare the parameters with the digests of files, and digest files where a comparison proves nothing."""
        try:
            proof = self.compare(record, digests)
        except NotHeld as error:
            # If the files are wrong, the model is not.
            must_be_those_of(received, digests, error.tensors)
            raise
        share = self._pick_share(received)
        left = [name for name in share if name not in proof.proved and name not in proof.shares]
        must_be_those_of(received, digests, left)
        return proof

    def _pick_share(self, names: Iterable[str]) -> list[str]:
        """Pick this worker's share of the names: each belongs to one worker of the engine."""
        world_size = self._config.parallel_config.world_size
        return sorted(names)[self._worker.rank % world_size :: world_size]

    def _list_obstacles(self, specs: list[TensorSpec]) -> tuple[str, ...]:
        """List why vLLM must load this model's weights; learning the order came before."""
        assert self.order is not None
        is_alone = self._config.parallel_config.world_size == 1
        unheld = find_unheld(self.order, specs) if is_alone else ()
        kind, quantization = self._device.type, self._config.model_config.quantization
        return (
            *([] if kind in self.in_place_on else [f"its device type is {kind}"]),
            *([f"it quantizes its weights ({quantization})"] if quantization else []),
            *find_obstacles(self._model, self.order, unheld),
        )

    def _find_obstacles(self, specs: list[TensorSpec]) -> tuple[str, ...]:
        """List why vLLM must load these tensors."""
        if self.obstacles or self.order is None:
            return self.obstacles
        return tuple(find_misfits(self._model, self.order, specs))

    def _end_recording(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream[0].close()

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Mark the model as torn if a load fails half-way: vLLM cannot resume it, so nothing is loaded again."""
        self._must_be_whole()
        self._is_torn = True
        with torch.no_grad():
            yield
        self._is_torn = False

    def _must_be_whole(self) -> None:
        if self._is_torn:
            raise Refusal("an earlier update broke off in this worker: it has to be started again")

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def _config(self) -> Any:
        return self._worker.vllm_config

    @property
    def _checkpoint(self) -> Path:
        """The folder that the engine started from."""
        return Path(self._config.model_config.model)
