"""Our extension of vLLM's workers: it receives, digests and loads weights, and reports which weights it holds.

vLLM mixes this class into its worker. Its methods are called through /collective_rpc with strings, and answer plain
data. A refusal is the answer `{"error": ..., "code": ...}` and not an exception, because vLLM would report an exception
only as "worker failed".

Before a load changes a weight, the worker compares the digests that came with the files with the announced fingerprint,
and names and shapes with those of the checkpoint that the engine started from. After the load it compares the digests
of its parameters with the digests that came (`held.py`), which also proves the files. A tensor that workers hold in
parts is proved by all of them together (`find_wrongly_shared`). Any other tensor that is not proved is digested as it
came, by one of the workers.

On some devices the worker copies files into the parameters in place (`in_place.py`). Anything else is loaded by vLLM.
Where it copies in place, it takes weights from the trainer's own devices if these are offered (`offered.py`): then it
reads no file but that of the digests.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl import platforms
from megatron_rl.errors import MegatronRLError
from megatron_rl.platforms.device_sharing import CannotShare, DeviceSharing
from megatron_rl.shared.weights.arrival import Arrival
from megatron_rl.shared.weights.files import Checkpoint, read_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import Offer, taken
from megatron_rl.sidecar.engines import RefusalCode
from megatron_rl.sidecar.vllm.closing import close_listeners, take_names_off
from megatron_rl.sidecar.vllm.held import InPlaceDigester, LoadProof, NotHeld, Order, compare, digesting
from megatron_rl.sidecar.vllm.in_place import Places, find_misfits, find_obstacles
from megatron_rl.sidecar.vllm.kept_order import recall_or_learn
from megatron_rl.sidecar.vllm.maps import Maps, map_file_tensors
from megatron_rl.sidecar.vllm.offered import OpenedMemory, OpenedOffer, find_unheld
from megatron_rl.sidecar.vllm.patches import pack_tied_layers
from megatron_rl.sidecar.vllm.received import (
    NotWritten,
    Record,
    Refusal,
    list_specs,
    must_be_announced,
    must_be_private,
    must_be_those_of,
    wait_for_each,
)

# A tied output layer is one tensor in our exports, and may be stored twice in a checkpoint.
_TIED = "lm_head.weight"

RpcAnswer = dict[str, Any]


_CODES: tuple[tuple[type[MegatronRLError], RefusalCode], ...] = (
    (NotHeld, RefusalCode.WRONG_WEIGHTS),
    (NotWritten, RefusalCode.NOT_WRITTEN),
    (MegatronRLError, RefusalCode.REFUSED),
)
"""The codes of refusals; the first class that matches counts."""


def answered(method: Callable[..., RpcAnswer]) -> Callable[..., RpcAnswer]:
    """Turn a refusal into an answer."""

    def call(self: Any, *args: str) -> RpcAnswer:
        try:
            return method(self, *args)
        except MegatronRLError as refusal:
            code = next(code for kind, code in _CODES if isinstance(refusal, kind))
            return {"error": str(refusal), "code": str(code)}

    return call


class WorkerExtension:
    """Mixed into vLLM's worker, which owns `rank`, `vllm_config`, `model_runner` and `reload_weights`."""

    # The fingerprint of the weights that the worker holds, and whether a load in it failed half-way.
    megatron_rl_fingerprint: str = ""
    megatron_rl_is_torn: bool = False
    megatron_rl_stream: Any = None
    megatron_rl_maps: Maps | None = None
    # Names and shapes of the tensors of the checkpoint that the engine started from; None until they are read.
    megatron_rl_wanted: dict[str, tuple[int, ...]] | None = None
    # The places of the tensors in the parameters; None until they are learned.
    megatron_rl_order: Order | None = None
    megatron_rl_digester: InPlaceDigester | None = None
    # The memory of the trainer's devices; None until it is offered.
    megatron_rl_memory: OpenedMemory | None = None
    # The types of devices on which files are copied in place, and why vLLM loads them all the same, if it does.
    megatron_rl_in_place_on: tuple[str, ...] = ("cuda",)
    megatron_rl_obstacles: tuple[str, ...] = ("the order of its parameters was not learned at its start",)

    rank: int
    vllm_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]

    @answered
    def megatron_rl_prepare(self, scoring: str = "ours") -> RpcAnswer:
        """Prepare the worker; return the facts about it that the sidecar needs.

        `scoring` says whose kernel computes the log-probs of sampled tokens on GPUs, "ours" or "vllm".
        """
        import vllm
        from vllm.outputs import CompletionOutput
        from vllm.platforms import current_platform

        from megatron_rl.sidecar.vllm.patches import (
            has_experts,
            patch_experts_updated_in_place,
            patch_seeded_partial_prefill,
        )
        from megatron_rl.sidecar.vllm.scoring import use_own_scoring

        config, model = self.vllm_config.model_config, self.model_runner.get_model()
        has_new_runner, device = getattr(self, "use_v2_model_runner", False), next(model.parameters()).device
        return {
            "vllm": vllm.__version__,
            "pid": os.getpid(),
            "rank": self.rank,
            "world_size": self.vllm_config.parallel_config.world_size,
            "max_model_len": config.max_model_len,
            "max_num_seqs": self.vllm_config.scheduler_config.max_num_seqs,
            "vocab_size": config.get_vocab_size(),
            "dtype": str(config.dtype).removeprefix("torch."),
            "is_quantized": bool(config.quantization),
            "has_experts": has_experts(model),
            "device": "cpu" if current_platform.is_cpu() else current_platform.device_type,
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "records_weights": "weight_versions" in CompletionOutput.__annotations__,
            "eos_token_ids": sorted(_eos_token_ids(config)),
            "seed_patch": patch_seeded_partial_prefill(),
            "moe_patch": patch_experts_updated_in_place(model),
            "scoring_patch": use_own_scoring(scoring, has_new_runner, device, config.dtype),
            "listeners_closed": close_listeners() if current_platform.is_cpu() else 0,
            "names_taken_off": take_names_off() if current_platform.is_cpu() else 0,
        }

    @answered
    def megatron_rl_load(self, folder: str, user: str, expected: str) -> RpcAnswer:
        """Load the weights in a folder, if they have the announced fingerprint and no tensor is missing.

        They are copied from the trainer's devices if these are offered and can be opened, and else from files.
        """
        path = Path(folder)
        must_be_private(path, int(user))
        digests = read_digests(path)
        reasons: Sequence[str] = ()
        with taken(path) as offer:
            if offer is not None:
                opened, reasons = self.megatron_rl_open(offer)
                if opened is not None:
                    answer = self.megatron_rl_load_offered(opened, digests, expected)
                    return {**answer, "through": "ipc", "reasons": []}
        return {**self.megatron_rl_load_files(path, digests, expected), "through": "files", "reasons": list(reasons)}

    def megatron_rl_load_files(self, folder: Path, digests: Mapping[str, list[int]], expected: str) -> RpcAnswer:
        """Load the tensors in a folder's files, each once it has arrived."""
        if self.megatron_rl_maps is None:
            device = next(self.model_runner.get_model().parameters()).device
            self.megatron_rl_maps = Maps(platforms.select("cuda") if device.type == "cuda" else None)
        received = self.megatron_rl_maps.find(folder)
        specs = list_specs(received)
        must_be_announced(specs, digests, expected)
        self.megatron_rl_check_complete(specs)
        self.megatron_rl_learn(specs)
        with Arrival(folder, specs) as arrival:
            if not arrival.is_coming():
                raise NotWritten(f"{folder} lacks weights, and no trainer is writing them any more")
            missing: list[str] = []
            obstacles = self.megatron_rl_find_obstacles(specs)
            record = self.megatron_rl_replace_weights(wait_for_each(received, arrival, missing), not obstacles)
        if missing:
            raise NotWritten(
                f"the trainer ended before it had written {len(missing)} tensors: {', '.join(missing[:5])}"
            )
        try:
            proof = self.megatron_rl_compared(record, digests)
        except NotHeld as error:
            must_be_those_of(received, digests, error.tensors)
            raise
        share = self.megatron_rl_pick_share(received)
        left = [name for name in share if name not in proof.proved and name not in proof.shares]
        must_be_those_of(received, digests, left)
        self.megatron_rl_fingerprint = expected
        return {"fingerprint": expected, "obstacles": list(obstacles), **_describe(proof, digests)}

    def megatron_rl_open(self, offer: Offer) -> tuple[OpenedOffer | None, Sequence[str]]:
        """Open the memory that is offered; if this worker must read files instead, return the reasons."""
        sharing = self.megatron_rl_find_sharing()
        if sharing is None:
            return None, ["the engine's device type has no memory that processes share"]
        if self.megatron_rl_obstacles or self.megatron_rl_order is None:
            return None, ["the engine does not copy weights in place"]
        if self.megatron_rl_memory is None:
            self.megatron_rl_memory = OpenedMemory(sharing)
        try:
            opened = self.megatron_rl_memory.open(offer)
        except CannotShare as refusal:
            return None, [str(refusal)]
        specs = list(opened.specs)
        reasons = [*self.megatron_rl_find_obstacles(specs), *find_unheld(self.megatron_rl_order, specs, _TIED)]
        return None if reasons else opened, reasons

    def megatron_rl_find_sharing(self) -> DeviceSharing | None:
        """Return how this worker opens the memory of other processes' devices; None if it cannot."""
        device = next(self.model_runner.get_model().parameters()).device
        return platforms.select("cuda").device_sharing() if device.type == "cuda" else None

    def megatron_rl_load_offered(
        self, opened: OpenedOffer, digests: Mapping[str, list[int]], expected: str
    ) -> RpcAnswer:
        """Copy weights from the trainer's devices, and compare the parameters with the digests that came."""
        assert self.megatron_rl_memory is not None
        specs = list(opened.specs)
        must_be_announced(specs, digests, expected)
        self.megatron_rl_check_complete(specs)
        self.megatron_rl_fingerprint = ""
        with self.megatron_rl_loading(), torch.no_grad():
            record, places = self.megatron_rl_begin_copy()
            for spec in specs:
                record.note(spec)
            self.megatron_rl_memory.copy(opened, places)
            self.megatron_rl_end_copy(record, places)
        try:
            proof = self.megatron_rl_compared(record, digests)
        except NotHeld as error:
            text = f"{error} (they were copied from the trainer's devices; --publish-through files takes files)"
            raise NotHeld(text, error.tensors) from None
        self.megatron_rl_fingerprint = expected
        return {"fingerprint": expected, "obstacles": [], **_describe(proof, digests)}

    @answered
    def megatron_rl_check_files(self, folder: str, *names: str) -> RpcAnswer:
        """Refuse files of which these tensors do not match the digests that came with them."""
        received, digests = map_file_tensors(Path(folder)), read_digests(Path(folder))
        must_be_those_of(received, digests, self.megatron_rl_pick_share(names))
        return {}

    @answered
    def megatron_rl_learn_order(self) -> RpcAnswer:
        """Learn the places of tensors in the parameters, if the engine's checkpoint lists the tensors.

        The engine holds no real weights afterwards.
        """
        specs = list_specs(_started_from(Path(self.vllm_config.model_config.model)))
        if specs:
            self.megatron_rl_learn(specs)
            self.megatron_rl_obstacles = self.megatron_rl_list_obstacles(specs)
        order = self.megatron_rl_order
        return {
            "unknown": None if order is None else list(order.unknown),
            "obstacles": list(self.megatron_rl_obstacles),
        }

    @answered
    def megatron_rl_reload_checkpoint(self, by: str = "") -> RpcAnswer:
        """Replace the weights by those of the checkpoint that this engine started from, if they can be loaded.

        They are copied in place if they can be, unless `by` is "vllm". Nothing is compared.
        """
        tensors = _started_from(Path(self.vllm_config.model_config.model))
        if tensors:
            self.megatron_rl_replace_weights(tensors.items(), not (by or self.megatron_rl_obstacles))
        return {"reloaded": bool(tensors), "obstacles": list(self.megatron_rl_obstacles)}

    @answered
    def megatron_rl_leave_loads_to_vllm(self, reason: str) -> RpcAnswer:
        """Copy no weights in place from now on."""
        self.megatron_rl_obstacles = (reason,)
        return {}

    @answered
    def megatron_rl_begin_stream(self) -> RpcAnswer:
        """Digest all tensors that vLLM's own transfer engine passes to the model, before they are loaded."""
        self.megatron_rl_end_recording()
        if self.megatron_rl_is_torn:
            raise Refusal("an earlier update broke off in this worker: it has to be started again")
        self.megatron_rl_is_torn = True
        self.megatron_rl_fingerprint = ""
        self.megatron_rl_stream = self.megatron_rl_recorded(with_digests=True)
        self.megatron_rl_stream_record = self.megatron_rl_stream.__enter__()
        return {}

    @answered
    def megatron_rl_end_stream(self, expected: str) -> RpcAnswer:
        """Check that all of the announced weights arrived."""
        if self.megatron_rl_stream is None:
            raise Refusal("no stream was begun")
        record = self.megatron_rl_stream_record
        with torch.no_grad():
            pack_tied_layers(self.model_runner.get_model())
        self.megatron_rl_end_recording()
        digests = record.read_digests()
        found = compute_fingerprint(record.specs, digests)
        if found != expected:
            raise Refusal(f"the weights received have fingerprint {found}, and {expected} was announced")
        self.megatron_rl_check_complete(record.specs)
        record.check_all_loaded()
        self.megatron_rl_is_torn = False
        proof = self.megatron_rl_compared(record, digests)
        self.megatron_rl_fingerprint = found
        return {"fingerprint": found, **_describe(proof, digests)}

    @answered
    def megatron_rl_report(self) -> RpcAnswer:
        """Answer with the fingerprint of the weights that this worker holds; empty if an update failed half-way."""
        return {"fingerprint": "" if self.megatron_rl_is_torn else self.megatron_rl_fingerprint}

    def megatron_rl_replace_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], is_in_place: bool) -> Record:
        """Replace all weights of the model."""
        self.megatron_rl_fingerprint = ""
        with self.megatron_rl_loading(), torch.no_grad():
            if is_in_place:
                return self.megatron_rl_copy(tensors)
            with self.megatron_rl_recorded() as recorded:
                self.megatron_rl_reload(tensors)
                recorded.check_all_loaded()
            return recorded

    def megatron_rl_copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Record:
        """Copy tensors into the parameters in place.

        Unlike vLLM's reload this clears no cache of encoders or adapters, since an engine of ours has none.
        """
        record, places = self.megatron_rl_begin_copy()
        for name, tensor in record.noted(tensors, with_digests=False):
            places.put(name, tensor)
        self.megatron_rl_end_copy(record, places)
        return record

    def megatron_rl_begin_copy(self) -> tuple[Record, Places]:
        order = self.megatron_rl_order
        assert order is not None
        return Record(set(order.rows)), Places(self.model_runner.get_model(), order)

    def megatron_rl_end_copy(self, record: Record, places: Places) -> None:
        """Wait for the copies, and digest the parameters."""
        model, order = self.model_runner.get_model(), self.megatron_rl_order
        assert order is not None
        places.wait()
        digester = self.megatron_rl_digester
        if digester is None or not digester.is_for(model, order, record.dtypes):
            digester = self.megatron_rl_digester = InPlaceDigester(model, order, record.dtypes)
        record.readings = digester.digest()
        record.is_in_place = True

    def megatron_rl_reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=iter(tensors))
        pack_tied_layers(self.model_runner.get_model())

    def megatron_rl_list_obstacles(self, specs: list[TensorSpec]) -> tuple[str, ...]:
        """List why vLLM must load this model's weights; learning the order came before."""
        model, order, config = self.model_runner.get_model(), self.megatron_rl_order, self.vllm_config
        assert order is not None
        device = next(model.parameters()).device.type
        held = {tensor for rows in order.rows.values() for tensor in rows.tensors}
        # Other workers may hold what this one does not.
        is_alone = config.parallel_config.world_size == 1
        unheld = {spec.name for spec in specs} - held - {_TIED} if is_alone else ()
        return (
            *([] if device in self.megatron_rl_in_place_on else [f"its device type is {device}"]),
            *([f"it quantizes its weights ({kind})"] if (kind := config.model_config.quantization) else []),
            *find_obstacles(model, order, unheld),
        )

    def megatron_rl_find_obstacles(self, specs: list[TensorSpec]) -> tuple[str, ...]:
        """List why vLLM must load these tensors."""
        if self.megatron_rl_obstacles or self.megatron_rl_order is None:
            return self.megatron_rl_obstacles
        return tuple(find_misfits(self.model_runner.get_model(), self.megatron_rl_order, specs))

    @contextlib.contextmanager
    def megatron_rl_loading(self) -> Iterator[None]:
        """Mark the worker as torn if a load fails half-way.

        vLLM cannot resume the load, so a torn worker never loads or reports again.
        """
        if self.megatron_rl_is_torn:
            raise Refusal("an earlier update broke off in this worker: it has to be started again")
        self.megatron_rl_is_torn = True
        yield
        self.megatron_rl_is_torn = False

    @contextlib.contextmanager
    def megatron_rl_recorded(self, with_digests: bool = False) -> Iterator[Record]:
        """Record the tensors that the model's `load_weights` gets, and the names that it reports as loaded."""
        model = self.model_runner.get_model()
        record = Record({name for name, _ in model.named_parameters()})
        original = model.load_weights

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            loaded = original(record.noted(weights, with_digests), *args, **kwargs)
            record.loaded |= set(loaded or ())
            return loaded

        model.load_weights = load_weights
        try:
            if self.megatron_rl_order is None:
                yield record
            else:
                with digesting(model, self.megatron_rl_order, record.dtypes) as record.readings:
                    yield record
        finally:
            del model.load_weights

    def megatron_rl_end_recording(self) -> None:
        stream, self.megatron_rl_stream = self.megatron_rl_stream, None
        if stream is not None:
            stream.__exit__(None, None, None)

    def megatron_rl_learn(self, specs: list[TensorSpec]) -> None:
        """Learn the places of tensors; once is enough, because they do not change."""
        if self.megatron_rl_order is not None:
            return
        self.megatron_rl_fingerprint = ""
        dtype = self.vllm_config.model_config.dtype
        with self.megatron_rl_loading(), torch.no_grad():
            model = self.model_runner.get_model()
            self.megatron_rl_order = recall_or_learn(
                model, specs, dtype, lambda tensors: self.megatron_rl_reload(tensors.items()), self.megatron_rl_facts()
            )

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

    def megatron_rl_compared(self, record: Record, digests: Mapping[str, list[int]]) -> LoadProof:
        """Compare the parameters after a load with the given tensors; raise NotHeld if they differ."""
        if self.megatron_rl_order is None or record.readings is None:
            return LoadProof(0, len(record.parameters), tuple(sorted(record.parameters)), {}, (), frozenset())
        order = self.megatron_rl_order
        if record.is_in_place:
            order = dataclasses.replace(order, handed_over=frozenset())
        return compare(order, record.readings, digests, record.specs)

    def megatron_rl_pick_share(self, names: Iterable[str]) -> list[str]:
        """Pick this worker's share of the names: each belongs to one worker of the engine."""
        world_size = self.vllm_config.parallel_config.world_size
        return sorted(names)[self.rank % world_size :: world_size]

    def megatron_rl_check_complete(self, specs: list[TensorSpec]) -> None:
        """Check names and shapes against the checkpoint that this engine started from."""
        if self.megatron_rl_wanted is None:
            tensors = _started_from(Path(self.vllm_config.model_config.model))
            self.megatron_rl_wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = self.megatron_rl_wanted
        given = {spec.name: spec.shape for spec in specs}
        if not wanted:
            return
        missing = sorted(wanted.keys() - given.keys() - {_TIED})
        unknown = sorted(given.keys() - wanted.keys() - {_TIED})
        other = sorted(name for name in wanted.keys() & given.keys() if wanted[name] != given[name])
        for names, what in ((missing, "missing"), (unknown, "not in this model"), (other, "of another shape")):
            if names:
                raise Refusal(f"{len(names)} tensors are {what}: {', '.join(names[:5])}")


def _describe(proof: LoadProof, digests: Mapping[str, list[int]]) -> RpcAnswer:
    return {
        "compared": proof.num_compared,
        "parameters": proof.num_parameters,
        "uncompared": proof.uncompared,
        "shares": {name: {"whole": list(digests[name]), "parts": parts} for name, parts in proof.shares.items()},
        "unheld": [name for name in proof.unheld if name != _TIED],
    }


def _started_from(folder: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of the checkpoint; return none if it is in another format."""
    if not any(folder.glob("*.safetensors")):
        return {}
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def _eos_token_ids(config: Any) -> set[int]:
    """Return the tokens that end a response, by the model's config.json and generation_config.json."""
    path = Path(config.model) / "generation_config.json"
    stored = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    found = set()
    for value in (stored, getattr(config.hf_text_config, "eos_token_id", None)):
        found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return found
