"""A Megatron model's weights in Hugging Face's form: loaded, saved, streamed and fingerprinted."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingABC
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.errors import InputError, find_no_room, room_checked
from megatron_rl.shared.weights import files, folders
from megatron_rl.shared.weights.end_tokens import add_end_tokens
from megatron_rl.shared.weights.families import derive_config
from megatron_rl.shared.weights.files import Checkpoint
from megatron_rl.shared.weights.fingerprint import compute_fingerprint
from megatron_rl.shared.weights.folders import Counter
from megatron_rl.shared.weights.mapping import Mapping, TensorSpec
from megatron_rl.shared.weights.shards import (
    Bucket,
    Count,
    Digests,
    HostExport,
    Put,
    Shard,
    WeightStream,
    export,
    load_shards,
    map_shards,
)
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, named_shards
from megatron_rl.trainer.mcore.model.lora import Adapters, list_scaled
from megatron_rl.trainer.mcore.session import Session

if TYPE_CHECKING:
    from megatron_rl.shared.weights.device_export import DeviceExport

_DEVICE_EXPORT = "megatron_rl.shared.weights.device_export"
_log = logging.getLogger(__name__)
# Files beside the weights, which engines and users need. They are copied unchanged.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


class ModelWeights:
    """The weights of one model, spread over the ranks of a session."""

    def __init__(self, chunks: list[PackedGPTModel], session: Session):
        self.architecture = chunks[0].architecture
        self.mapping = Mapping(self.architecture)
        self._session = session
        self.dtype = str(chunks[0].config.params_dtype).removeprefix("torch.")
        """The dtype of the parameters. The architecture has the dtype of the Hugging Face folder."""
        self._padded_vocab_size = chunks[0].vocab_size
        # By the dtype of published files.
        self._exports: dict[str | None, HostExport | DeviceExport] = {}
        self._writers: list[int] | None = None
        # By the dtype of streamed tensors, and the bytes of a bucket.
        self._streams: dict[tuple[str | None, int], WeightStream] = {}
        self.adapters: Adapters | None = None
        """The adapters that are merged into what is exported, or exported without their base."""
        self.base = ""
        """The fingerprint of the base of adapters that are exported without it; empty for whole weights."""
        self.shards: list[Shard] = session.run_or_raise_everywhere(
            lambda: map_shards(self.mapping, session.coordinates, chunks[0].vocab_size, named_shards(chunks))
        )

    def merged_with(self, adapters: Adapters) -> "ModelWeights":
        """Return these weights as they are with the adapters merged into them. The parameters stay as they are."""
        merges = {name: adapter.merge for name, adapter in adapters.by_parameter.items()}
        shards = [dataclasses.replace(shard, compute=merges.get(shard.parameter_name)) for shard in self.shards]
        return self._replace(adapters, "", shards)

    def without_base(self, adapters: Adapters, dtype: str | None) -> "ModelWeights":
        """Return the adapters of these weights in their place, for engines that hold the weights in this dtype."""
        return self._replace(adapters, self.fingerprint(dtype), list_scaled(adapters))

    def _replace(self, adapters: Adapters, base: str, shards: list[Shard]) -> "ModelWeights":
        """Return a copy with other shards, without what follows from the places of these."""
        other = copy.copy(self)
        other._exports, other._streams, other._writers = {}, {}, None
        other.adapters, other.base, other.shards = adapters, base, shards
        return other

    def list_specs(self, dtype: str | None = None) -> list[TensorSpec]:
        """List the tensors that are exported."""
        if self.adapters is None or not self.base:
            return self.mapping.manifest(dtype)
        return self.adapters.mapping.manifest(dtype or self.architecture.dtype)

    @property
    def is_written_here(self) -> bool:
        """Whether this rank writes any of the tensors. Only one replica's copy of a tensor is written."""
        return any(shard.map.owned for shard in self.shards)

    def load_hf(self, folder: Path | str) -> None:
        """Fill the model from a Hugging Face folder, after every rank has checked the folder."""
        with self._session.run_or_raise_everywhere(lambda: _open(folder, self.mapping)) as checkpoint:
            if self._session.rank == 0 and not self.architecture.is_critic:
                left_out: dict[str, list[str]] = {}
                for name in checkpoint.left_out:
                    is_of_tower = self.mapping.is_of_tower(name)
                    what = "the vision model" if is_of_tower else "layers that predict several tokens"
                    left_out.setdefault(what, []).append(name)
                for what, names in left_out.items():
                    some = f"{len(names)} tensors of {what}, such as {names[0]}"
                    _log.warning("%s in %s are not trained, and exports copy them", some, folder)
            self._session.run_or_raise_everywhere(lambda: load_shards(self.shards, checkpoint))

    def zero_padding(self) -> None:
        """Zero the rows that pad the vocabulary, which a checkpoint with other padding does not fill."""
        for shard in self.shards:
            shard.zero_padding()

    def fingerprint(self, dtype: str | None = None) -> str:
        """Compute the fingerprint that these weights would have after an export."""
        return compute_fingerprint(self.list_specs(dtype), self._digest(dtype), self.base)

    def save_hf(
        self,
        folder: Path | str,
        source: Path | str | None = None,
        dtype: str | None = None,
        ends: Sequence[int] = (),
    ) -> str:
        """Write a folder that transformers and vLLM load, and return the fingerprint of its weights.

        Configuration, tokenizer and layers that are not trained are copied from the folder `source`. Rank 0's `ends`
        are listed as tokens that end a response. All ranks that write must write to the same file system. The folder
        gets its name when it is complete.
        """
        folder = Path(folder)
        staged = folder.with_name(f".{folder.name}.partial")
        session, copied = self._session, self._list_copied(source)
        manifest = [*self.mapping.manifest(dtype), *copied]
        plan = files.FilePlan(manifest, stacks_experts=self.mapping.stacks_experts)

        def put_in_place() -> None:
            with room_checked(staged):
                self._describe(staged, plan, source, dtype)
                add_end_tokens(staged, ends)
            files.put_in_place(staged, folder)

        session.run_on_first(lambda: _stage(staged, folder, plan))
        try:
            sums = Digests(self.mapping.manifest(dtype))
            session.run_or_raise_everywhere(lambda: self._write(staged, plan, [sums.add]))
            digests = sums.combine(session.control_group)
            if source is not None and copied:
                session.run_on_first(lambda: _copy(source, staged, plan, copied))
            session.run_on_first(put_in_place)
        except BaseException:
            if session.rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        return compute_fingerprint(sums.specs, digests)

    def _list_copied(self, source: Path | str | None) -> list[TensorSpec]:
        """List the tensors that are not trained, which an export copies from the folder `source`."""
        if source is None or not self.mapping.may_leave_out:
            return []

        def find() -> list[TensorSpec]:
            try:
                with Checkpoint(source) as checkpoint:
                    return checkpoint.list_left_out(self.mapping)
            except InputError as error:
                if self.mapping.has_tower:
                    raise
                _log.warning("layers that predict several tokens, if there are any, are not exported: %s", error)
                return []

        return self._session.run_on_first(find)

    @contextlib.contextmanager
    def begin_files(
        self,
        folder: Path,
        dtype: str | None = None,
        instead_of: Path | None = None,
        is_read_early: bool = False,
        is_laid_out_here: bool | None = None,
    ) -> Iterator["FilesBegun"]:
        """Lay out files for the tensors, readable by this user alone, and write the tensors' digests beside them.

        The tensors are written within the context; if that fails, the rank that laid the files out removes them. If the
        folder is read early, `folders.Arrival` tells readers which tensors have arrived. `instead_of` is a folder that
        an earlier call wrote with the same dtype: it is renamed, and its files are overwritten. Ranks other than rank 0
        lay files out too if `is_laid_out_here`: a folder of another host, which only gets what that host's ranks own.
        """
        exports, session, writers = self._get_export(dtype), self._session, self._find_writers()
        digests = self._digest(dtype)
        opened = contextlib.ExitStack()
        lays_out = session.rank == 0 if is_laid_out_here is None else is_laid_out_here

        def begin() -> None:
            staged = folder.with_name(f".{folder.name}.partial")
            # A user may have removed the folder, since it takes memory.
            if instead_of is not None and instead_of.is_dir():
                instead_of.rename(staged)
            else:
                _stage(staged, folder, exports.plan, private=True, is_sparse=session.rank != 0)
            try:
                with room_checked(staged):
                    files.write_digests(staged, digests)
                    if is_read_early:
                        opened.enter_context(folders.writing(staged, len(digests), len(writers)))
                files.put_in_place(staged, folder)
            except BaseException:
                opened.close()
                shutil.rmtree(staged, ignore_errors=True)
                raise

        session.run_or_raise_everywhere(lambda: begin() if lays_out else None)
        try:
            with opened:
                yield FilesBegun(session, folder, exports, self.base, digests, writers, is_read_early)
        except BaseException:
            if lays_out:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _digest(self, dtype: str | None) -> dict[str, list[int]]:
        exports = self._get_export(dtype)
        digests = Digests(list(exports.plan.specs.values()))
        exports.add_digests(digests)
        return digests.combine(self._session.control_group)

    def _find_writers(self) -> list[int]:
        """Return the ranks that write tensors, which stay the same."""
        if self._writers is None:
            are_writers = self._session.gather(self.is_written_here)
            self._writers = [rank for rank, is_writer in enumerate(are_writers) if is_writer]
        return self._writers

    def _get_export(self, dtype: str | None) -> "HostExport | DeviceExport":
        """Return what exports in this dtype: a device by kernels, unless numbers must be computed from several."""
        if dtype not in self._exports:
            session, plan = self._session, files.FilePlan(self.list_specs(dtype))
            if session.platform.device_type == "cpu" or self.adapters is not None:
                self._exports[dtype] = HostExport(self.shards, plan, self._find_start())
            else:
                self._exports[dtype] = importlib.import_module(_DEVICE_EXPORT).DeviceExport(
                    session.platform, self.shards, plan
                )
        return self._exports[dtype]

    def forget_files(self) -> None:
        """Release what is kept of files between publishes; a later publish makes it again."""
        for one in self._exports.values():
            one.forget_files()

    def stream(self, dtype: str | None = None, bucket_bytes: int = 1 << 28) -> Iterator[Bucket]:
        """Yield all tensors in buckets, which are empty on all ranks but rank 0; every rank takes part."""
        return self._stream_of(dtype, bucket_bytes).buckets(self.shards)

    def stream_specs(self, dtype: str | None = None, bucket_bytes: int = 1 << 28) -> list[list[TensorSpec]]:
        """Return the specs of the tensors in each bucket of `stream`."""
        return self._stream_of(dtype, bucket_bytes).specs

    def _stream_of(self, dtype: str | None, bucket_bytes: int) -> WeightStream:
        settings, session = (dtype, bucket_bytes), self._session
        if settings not in self._streams:
            names = session.gather(tuple(shard.parameter_name for shard in self.shards if shard.map.owned))
            peers = list(zip(session.all_coordinates, names, strict=True))
            self._streams[settings] = WeightStream(
                self.mapping, session.rank, peers, self._padded_vocab_size, *settings
            )
        return self._streams[settings]

    def _write(self, folder: Path, plan: files.FilePlan, puts: Sequence[Put]) -> None:
        """Write the tensors that this rank owns, and hand them to `puts` too."""
        # A rank that writes nothing may be on a host that does not have the folder.
        if not self.is_written_here:
            return
        with _writing_to(folder), files.Writer(folder, plan) as writer:
            first = int(len(self.shards) * self._find_start())
            export(self.shards, list(plan.specs.values()), [writer.put, *puts], first)

    def _find_start(self) -> float:
        """Return the share of shards that are written last: ranks begin at different files, and do not wait."""
        coordinates = self._session.coordinates
        return coordinates.tensor_rank / coordinates.tensor_size

    def _describe(self, staged: Path, plan: files.FilePlan, source: Path | str | None, dtype: str | None) -> None:
        if source is not None and (path := Path(source) / "config.json").exists():
            config = json.loads(path.read_text())
        else:
            config = dict(derive_config(self.architecture))
        stored = "dtype" if "dtype" in config else "torch_dtype"
        config[stored] = dtype or self.architecture.dtype
        if stored in config.get("text_config", {}):
            config["text_config"] = {**config["text_config"], stored: config[stored]}
        # Experts in MXFP4 and weights in scaled blocks were read in the model's dtype, and are written so.
        config.pop("quantization_config", None)
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if index := plan.index():
            (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for name in _COMPANIONS:
            if source is not None and (Path(source) / name).exists():
                shutil.copyfile(Path(source) / name, staged / name)


@dataclasses.dataclass
class FilesBegun:
    """Files whose tensors all ranks have yet to write."""

    session: Session
    folder: Path
    export: "HostExport | DeviceExport"
    base: str
    digests: MappingABC[str, Sequence[int]]
    writers: Sequence[int]
    """The ranks that write tensors."""
    is_read_early: bool
    """True if readers follow counts of what has been written."""

    @property
    def plan(self) -> files.FilePlan:
        return self.export.plan

    @functools.cached_property
    def fingerprint(self) -> str:
        return compute_fingerprint(self.plan.specs.values(), self.digests, self.base)

    def write(self, note: Count | None = None) -> None:
        """Write all tensors; every rank calls it. `note` learns of the elements of each tensor that are written."""
        self.session.run_or_raise_everywhere(lambda: self._write(note))

    def _write(self, note: Count | None) -> None:
        rank, specs = self.session.rank, list(self.plan.specs.values())
        # A rank that writes nothing may be on a host that does not have the folder.
        if rank not in self.writers:
            return
        with _writing_to(self.folder):
            if not self.is_read_early:
                self.export.write(self.folder, note)
                return
            with Counter(self.folder, specs, self.writers.index(rank), len(self.writers)) as counter:

                def count(name: str, num_elements: int) -> None:
                    # Readers of the files learn of them first.
                    counter.add(name, num_elements)
                    if note is not None:
                        note(name, num_elements)

                self.export.write(self.folder, count)


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise find_no_room(error, folder) or InputError(
            f"{folder} cannot be written: {error}; every rank that writes must reach the same folder"
        ) from None


def _open(folder: Path | str, mapping: Mapping) -> Checkpoint:
    checkpoint = Checkpoint(folder)
    checkpoint.check(mapping)
    return checkpoint


def _copy(source: Path | str, folder: Path, plan: files.FilePlan, specs: Sequence[TensorSpec]) -> None:
    """Write tensors of another folder unchanged."""
    with Checkpoint(source) as checkpoint, _writing_to(folder), files.Writer(folder, plan) as writer:
        for spec in specs:
            writer.put(spec.name, 0, 0, checkpoint.tensor(spec.name))


def _stage(staged: Path, folder: Path, plan: files.FilePlan, private: bool = False, is_sparse: bool = False) -> None:
    if folder.exists():
        raise InputError(f"{folder} exists already: choose another folder, or remove it")
    # A run that was killed while it wrote may have left such a folder.
    shutil.rmtree(staged, ignore_errors=True)
    try:
        files.create(staged, plan, private, is_sparse)
    except OSError as error:
        raise find_no_room(error, staged) or InputError(f"{staged} cannot be created: {error}") from None
