"""Our extension of vLLM's workers: it receives, loads and proves weights, and reports which weights it holds.

vLLM mixes this class into its worker. Its methods are called with strings, and answer plain data. A refusal is the
answer `{"error": ..., "code": ...}` and not an exception, because vLLM would report an exception only as "worker
failed".

This module has these methods, and the ways in which weights reach the parameters. A load is proved before the worker
reports its weights (`proofs.py`). If a load breaks off in the model, the worker is torn and reports nothing.

On some devices the worker copies files into the parameters in place (`in_place.py`). Anything else is loaded by vLLM.
Where it copies in place, it copies from the trainer's own devices if these are offered. Then it reads no file but that
of the digests.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl import platforms
from megatron_rl.errors import MegatronRLError
from megatron_rl.ops.triton_support import without_compile_hook
from megatron_rl.platforms.device_sharing import CannotShare, DeviceSharing
from megatron_rl.shared.weights.files import read_digests
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import Offer, taken
from megatron_rl.sidecar.engines import RefusalCode
from megatron_rl.sidecar.vllm.adapters import AdapterLoader
from megatron_rl.sidecar.vllm.derived import describe_quantization
from megatron_rl.sidecar.vllm.held import NotHeld
from megatron_rl.sidecar.vllm.in_place import (
    OpenedMemory,
    OpenedOffer,
    Places,
    find_misfits,
    find_obstacles,
    find_unheld,
)
from megatron_rl.sidecar.vllm.learned_order import recall_or_learn
from megatron_rl.sidecar.vllm.parts import pick_place
from megatron_rl.sidecar.vllm.patches import close_listeners, pack_tied_layers, take_names_off
from megatron_rl.sidecar.vllm.proofs import TIED, describe_proof, read_started_from
from megatron_rl.sidecar.vllm.received import (
    Maps,
    NotWritten,
    Record,
    Refusal,
    arriving,
    list_specs,
    map_file_tensors,
    must_be_announced,
    must_be_private,
    must_be_reached,
    must_be_those_of,
)

RpcAnswer = dict[str, Any]

_CODES: tuple[tuple[type[MegatronRLError], RefusalCode], ...] = (
    (NotHeld, RefusalCode.WRONG_WEIGHTS),
    (NotWritten, RefusalCode.NOT_WRITTEN),
    (MegatronRLError, RefusalCode.REFUSED),
)
"""The codes of refusals; the first class that matches counts."""


def answered(method: Callable[..., RpcAnswer]) -> Callable[..., RpcAnswer]:
    """Turn a refusal into an answer; the kernels of the method may compile."""

    def call(self: Any, *args: str) -> RpcAnswer:
        try:
            with without_compile_hook():
                return method(self, *args)
        except MegatronRLError as refusal:
            code = next(code for kind, code in _CODES if isinstance(refusal, kind))
            return {"error": str(refusal), "code": str(code)}

    return call


class WorkerExtension(AdapterLoader):
    """Mixed into vLLM's worker, which owns `rank`, `vllm_config`, `model_runner` and `reload_weights`."""

    # The fingerprint of the weights that the worker holds, and whether a load in it failed half-way.
    megatron_rl_fingerprint: str = ""
    megatron_rl_is_torn: bool = False
    megatron_rl_stream: Any = None
    megatron_rl_maps: Maps | None = None
    # The memory of the trainer's devices; None until it is offered.
    megatron_rl_memory: OpenedMemory | None = None
    # The types of devices on which files are copied in place, and why vLLM loads them all the same, if it does.
    megatron_rl_in_place_on: tuple[str, ...] = ("cuda",)
    megatron_rl_obstacles: tuple[str, ...] = ("the order of its parameters was not learned at its start",)

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
            describe_draft_model,
            find_wrong_rotations,
            has_experts,
            patch_experts_updated_in_place,
            patch_products_of_adapters,
            patch_seeded_partial_prefill,
            patch_temperatures_of_drafts,
            returns_experts,
        )
        from megatron_rl.sidecar.vllm.scoring import use_own_scoring
        from megatron_rl.sidecar.vllm.stacked import patch_stacked_experts

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
            "quantization": describe_quantization(self.vllm_config),
            "has_experts": has_experts(model),
            "returns_experts": returns_experts(self.vllm_config),
            "device": "cpu" if current_platform.is_cpu() else current_platform.device_type,
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "records_weights": "weight_versions" in CompletionOutput.__annotations__,
            "eos_token_ids": sorted(_eos_token_ids(config)),
            "seed_patch": patch_seeded_partial_prefill(),
            "has_drafts": self.vllm_config.speculative_config is not None,
            "products_patch": patch_products_of_adapters(self.vllm_config.lora_config),
            "draft_model": describe_draft_model(self.model_runner),
            "draft_patch": patch_temperatures_of_drafts(self.vllm_config.speculative_config),
            "moe_patch": patch_experts_updated_in_place(model),
            "stacked_patch": patch_stacked_experts(model, self.megatron_rl_find_tensor_rank()),
            "wrong_rotations": find_wrong_rotations(model) if current_platform.is_cpu() else [],
            "scoring_patch": use_own_scoring(scoring, has_new_runner, device, config.dtype),
            "listeners_closed": close_listeners() if current_platform.is_cpu() else 0,
            "names_taken_off": take_names_off() if current_platform.is_cpu() else 0,
        }

    @answered
    def megatron_rl_load(self, places: str, expected: str, base: str = "", number: str = "0") -> RpcAnswer:
        """Load the weights in its host's folder, if they have the announced fingerprint and no tensor is missing.

        They are copied from the trainer's devices if these are offered and can be opened, and else from files. With the
        fingerprint of a base, they are adapters on it, which requests name by the number.
        """
        path, user = pick_place(places, self.vllm_config.parallel_config)
        must_be_private(path, user)
        digests = read_digests(path)
        reasons: Sequence[str] = ()
        if base:
            answer = self.megatron_rl_load_adapters(path, digests, expected, base, int(number))
            return {**answer, "through": "files", "reasons": []}
        with taken(path) as offer:
            if offer is not None:
                opened, reasons = self.megatron_rl_open(offer)
                if opened is not None:
                    answer = self.megatron_rl_load_offered(opened, digests, expected)
                    return {**answer, "through": "ipc", "reasons": []}
        return {**self.megatron_rl_load_files(path, digests, expected), "through": "files", "reasons": list(reasons)}

    def megatron_rl_load_files(self, folder: Path, digests: Mapping[str, list[int]], expected: str) -> RpcAnswer:
        """Load the tensors in a folder's files, each once it has arrived."""
        received = self.megatron_rl_map(folder)
        specs = list_specs(received)
        must_be_announced(specs, digests, expected)
        self.megatron_rl_check_complete(specs)
        self.megatron_rl_learn(specs)
        with arriving(folder, received, specs) as tensors:
            obstacles = self.megatron_rl_find_obstacles(specs)
            record = self.megatron_rl_replace_weights(tensors, not obstacles)
        proof = self.megatron_rl_prove_files(record, received, digests)
        self.megatron_rl_fingerprint = expected
        return {"fingerprint": expected, "obstacles": list(obstacles), **describe_proof(proof, digests)}

    def megatron_rl_map(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """Map the tensors of a folder's files."""
        if self.megatron_rl_maps is None:
            device = next(self.model_runner.get_model().parameters()).device
            self.megatron_rl_maps = Maps(platforms.select("cuda") if device.type == "cuda" else None)
        return self.megatron_rl_maps.find(folder)

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
        reasons = [*self.megatron_rl_find_obstacles(specs), *find_unheld(self.megatron_rl_order, specs, TIED)]
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
        return {"fingerprint": expected, "obstacles": [], **describe_proof(proof, digests)}

    @answered
    def megatron_rl_check_files(self, places: str, *names: str) -> RpcAnswer:
        """Refuse files of which these tensors, which the workers hold wrongly, do not match their digests.

        Those of a base that engines keep are in no file: the base is loaded again with the next adapters.
        """
        path, _ = pick_place(places, self.vllm_config.parallel_config)
        received, digests = map_file_tensors(path), read_digests(path)
        if set(names) - received.keys():
            self.megatron_rl_forget_base()
        must_be_those_of(received, digests, self.megatron_rl_pick_share(received.keys() & set(names)))
        return {}

    @answered
    def megatron_rl_learn_order(self) -> RpcAnswer:
        """Learn the places of tensors in the parameters, if the engine's checkpoint lists the tensors.

        The engine holds no real weights afterwards.
        """
        specs = list_specs(read_started_from(Path(self.vllm_config.model_config.model)))
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

        They are copied in place if they can be, unless `by` is "vllm". Only the rules of quantization are tried again.
        """
        tensors = read_started_from(Path(self.vllm_config.model_config.model))
        if tensors:
            record = self.megatron_rl_replace_weights(tensors.items(), not (by or self.megatron_rl_obstacles))
            self.megatron_rl_try_derived(record)
        return {"reloaded": bool(tensors), "obstacles": list(self.megatron_rl_obstacles)}

    @answered
    def megatron_rl_leave_loads_to_vllm(self, reason: str) -> RpcAnswer:
        """Copy no weights in place from now on."""
        self.megatron_rl_obstacles = (reason,)
        return {}

    @answered
    def megatron_rl_reach(self, host: str, port: str) -> RpcAnswer:
        """Check that this worker can connect to the sender of a stream, which may be about to listen."""
        must_be_reached(host, int(port))
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
        must_be_announced(record.specs, digests, expected)
        self.megatron_rl_check_complete(record.specs)
        record.check_all_loaded()
        self.megatron_rl_is_torn = False
        proof = self.megatron_rl_compared(record, digests)
        self.megatron_rl_fingerprint = expected
        return {"fingerprint": expected, **describe_proof(proof, digests)}

    @answered
    def megatron_rl_report(self) -> RpcAnswer:
        """Answer with the fingerprint of the weights that this worker holds; empty if an update failed half-way."""
        return {"fingerprint": "" if self.megatron_rl_is_torn else self.megatron_rl_fingerprint}

    def megatron_rl_replace_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], is_in_place: bool) -> Record:
        """Replace all weights of the model."""
        self.megatron_rl_fingerprint = ""
        self.megatron_rl_forget_base()
        with self.megatron_rl_loading(), torch.no_grad():
            if is_in_place:
                return self.megatron_rl_copy(tensors)
            with self.megatron_rl_recorded() as recorded:
                self.megatron_rl_reload(tensors)
                recorded.check_all_loaded()
            return recorded

    def megatron_rl_copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Record:
        """Copy tensors into the parameters in place.

        Unlike vLLM's reload this clears no cache of encoders, since an engine of ours has none.
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
        places.wait()
        self.megatron_rl_digest_in_place(record)

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
        unheld = {spec.name for spec in specs} - held - {TIED} if is_alone else ()
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


def _eos_token_ids(config: Any) -> set[int]:
    """Return the tokens that end a response, by the model's config.json and generation_config.json."""
    path = Path(config.model) / "generation_config.json"
    stored = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    found = set()
    for value in (stored, getattr(config.hf_text_config, "eos_token_id", None)):
        found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return found
