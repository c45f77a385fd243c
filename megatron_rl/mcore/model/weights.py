"""A Megatron model's weights from and to Hugging Face's form: folders, streams, fingerprints."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingABC
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.errors import InputError
from megatron_rl.mcore.model.gpt import PackedGPTModel, named_shards
from megatron_rl.mcore.session import Session
from megatron_rl.weights import files
from megatron_rl.weights.families import derive_config
from megatron_rl.weights.files import Checkpoint
from megatron_rl.weights.fingerprint import compute_fingerprint
from megatron_rl.weights.mapping import Mapping, TensorSpec
from megatron_rl.weights.shards import Bucket, Digests, Shard, StageRank, WeightStream, export, map_shards

# Files beside the weights that engines and users need, copied as they are.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


class ModelWeights:
    """The weights of one model, spread over the ranks of a session."""

    def __init__(self, chunks: list[PackedGPTModel], session: Session):
        self.architecture = chunks[0].architecture
        self.mapping = Mapping(self.architecture)
        self._session = session
        self.dtype = str(chunks[0].config.params_dtype).removeprefix("torch.")
        """The dtype of the parameters; the architecture's is that of the Hugging Face folder."""
        self._padded_vocab_size = chunks[0].vocab_size
        self._stream: WeightStream | None = None
        self._stream_settings: tuple[str | None, int] | None = None
        self._maps = files.Maps()
        self.shards: list[Shard] = session.run_or_raise_everywhere(
            lambda: map_shards(self.mapping, session.coordinates, chunks[0].vocab_size, named_shards(chunks))
        )

    @property
    def is_written_here(self) -> bool:
        """Whether this rank writes any of the tensors; copies of them in other replicas are not written."""
        return any(shard.map.owned for shard in self.shards)

    def load_hf(self, folder: Path | str) -> None:
        """Fill the model from a Hugging Face folder. Everything is checked on every rank before anything is changed."""
        with self._session.run_or_raise_everywhere(lambda: _open(folder, self.mapping)) as checkpoint:
            self._session.run_or_raise_everywhere(lambda: self._load(checkpoint))

    def _load(self, checkpoint: Checkpoint) -> None:
        for shard in self.shards:
            shard.load(checkpoint)

    def zero_padding(self) -> None:
        """Zero the rows that pad the vocabulary: a checkpoint with other padding leaves them as they were."""
        for shard in self.shards:
            shard.zero_padding()

    def fingerprint(self, dtype: str | None = None) -> str:
        """Compute the fingerprint of these weights as they would be exported."""
        digests = Digests(self.mapping.manifest(dtype))
        export(self.shards, digests)
        return compute_fingerprint(digests.specs, digests.combine(self._session.control_group))

    def save_hf(self, folder: Path | str, source: Path | str | None = None, dtype: str | None = None) -> str:
        """Write a folder that transformers and vLLM load, and return the fingerprint of what it holds.

        Configuration and tokenizer are copied from the folder `source`. All ranks that write must write to one file
        system; the folder gets its name only when it is complete.
        """
        folder = Path(folder)
        return self._write_folder(
            folder, dtype, private=False, finish=lambda staged, plan, _: self._describe(staged, plan, source, dtype)
        )

    def write_files(self, folder: Path, dtype: str | None = None, instead_of: Path | None = None) -> str:
        """Write the tensors and their digests, readable by this user alone, and return their fingerprint.

        `instead_of` is a folder that an earlier call wrote with that dtype: it is renamed and its files overwritten.
        """
        return self._write_folder(
            folder,
            dtype,
            private=True,
            finish=lambda staged, _, digests: files.write_digests(staged, digests),
            instead_of=instead_of,
        )

    def _write_folder(
        self,
        folder: Path,
        dtype: str | None,
        private: bool,
        finish: Callable[[Path, files.FilePlan, dict[str, list[int]]], None],
        instead_of: Path | None = None,
    ) -> str:
        staged = folder.with_name(f".{folder.name}.partial")
        plan = files.FilePlan(self.mapping.manifest(dtype))
        session = self._session

        def put_in_place(digests: dict[str, list[int]]) -> None:
            finish(staged, plan, digests)
            files.put_in_place(staged, folder)

        def stage() -> None:
            # The folder may be gone: people who tidy a machine clear folders in memory too.
            if instead_of is not None and instead_of.is_dir():
                instead_of.rename(staged)
            else:
                _stage(staged, folder, plan, private)

        session.run_or_raise_everywhere(lambda: stage() if session.rank == 0 else None)
        try:
            maps = None if instead_of is None else self._maps
            written = session.run_or_raise_everywhere(lambda: self._write(staged, plan, maps))
            digests = written.combine(session.control_group)
            session.run_or_raise_everywhere(lambda: put_in_place(digests) if session.rank == 0 else None)
        except BaseException:
            if session.rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        return compute_fingerprint(written.specs, digests)

    def forget_files(self) -> None:
        """Let go of the files that `write_files` keeps mapped: their memory is free once they are removed."""
        self._maps.clear()

    def stream(self, dtype: str | None = None, bucket_bytes: int = 1 << 28) -> Iterator[Bucket]:
        """Yield the tensors of this rank's stage, in buckets, on the stage's first rank; other ranks get empty ones."""
        return self._stream_of(dtype, bucket_bytes).buckets(self.shards)

    def stream_specs(self, dtype: str | None = None, bucket_bytes: int = 1 << 28) -> list[list[TensorSpec]]:
        """Return the specs of the tensors in each bucket of `stream`."""
        return self._stream_of(dtype, bucket_bytes).specs

    def _stream_of(self, dtype: str | None, bucket_bytes: int) -> WeightStream:
        if self._stream is None or self._stream_settings != (dtype, bucket_bytes):
            self._stream_settings = (dtype, bucket_bytes)
            self._stream = self._new_stream(dtype, bucket_bytes)
        return self._stream

    def _new_stream(self, dtype: str | None, bucket_bytes: int) -> WeightStream:
        session = self._session
        names: list[tuple[str, ...]] = [()] * session.world_size
        mine = tuple(shard.parameter_name for shard in self.shards)
        dist.all_gather_object(names, mine, group=session.control_group)
        peers = [
            StageRank(rank, session.all_coordinates[rank], names[rank])
            for rank in dist.get_process_group_ranks(session.stage_group)
        ]
        return WeightStream(
            self.mapping, peers, self._padded_vocab_size, session.stage_group, session.device, dtype, bucket_bytes
        )

    def _write(self, staged: Path, plan: files.FilePlan, maps: files.Maps | None) -> Digests:
        digests = Digests(list(plan.specs.values()))
        coordinates = self._session.coordinates
        first = len(self.shards) * coordinates.tensor_rank // coordinates.tensor_size
        try:
            # A rank that writes nothing may be on a host that does not have the folder.
            with files.Writer(staged, plan, maps) if self.is_written_here else contextlib.nullcontext() as writer:
                export(self.shards, digests, None if writer is None else writer.put, first)
        except OSError as error:
            raise InputError(
                f"{staged} cannot be written: {error}; every rank that writes must reach the same folder"
            ) from None
        return digests

    def _describe(self, staged: Path, plan: files.FilePlan, source: Path | str | None, dtype: str | None) -> None:
        config = dict(_source_config(source) or derive_config(self.architecture))
        stored = "dtype" if "dtype" in config else "torch_dtype"
        config[stored] = dtype or self.architecture.dtype
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if index := plan.index():
            (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for name in _COMPANIONS:
            if source is not None and (Path(source) / name).exists():
                shutil.copyfile(Path(source) / name, staged / name)


def _open(folder: Path | str, mapping: Mapping) -> Checkpoint:
    checkpoint = Checkpoint(folder)
    checkpoint.check(mapping)
    return checkpoint


def _stage(staged: Path, folder: Path, plan: files.FilePlan, private: bool) -> None:
    if folder.exists():
        raise InputError(f"{folder} exists already: choose another folder, or remove it")
    # A run that was killed while it wrote may have left one.
    shutil.rmtree(staged, ignore_errors=True)
    try:
        files.create(staged, plan, private)
    except OSError as error:
        raise InputError(f"{staged} cannot be created: {error}") from None


def _source_config(source: Path | str | None) -> MappingABC[str, Any] | None:
    if source is None or not (Path(source) / "config.json").exists():
        return None
    return json.loads((Path(source) / "config.json").read_text())
