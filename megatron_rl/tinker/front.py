"""The front of a service: its sessions, models, samplers and checkpoints, and what their requests do.

Whoever has a key sees what was made with it, and nothing else. A model is `SESSION:train:N`, a sampler
`SESSION:sample:N`, and a checkpoint `tinker://MODEL/KIND/NAME`, a folder below `models` of the service's folder.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.serve import MOST_NAMED, MOST_UNNAMED
from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.protocol.wire import Response
from megatron_rl.sidecar.group_maker import Samplers
from megatron_rl.tinker import protobuf, sampling, work
from megatron_rl.tinker.futures import MOST_KNOWN, Body, Future, Futures, ModelLine, to_json
from megatron_rl.tinker.losses import LOSSES
from megatron_rl.tinker.provenance import Bearer, Sampled, SequenceRecord, mark_own
from megatron_rl.tinker.ranks import Ranks
from megatron_rl.tinker.saved import (
    KINDS,
    SAMPLER,
    SCHEME,
    STATE,
    TRAINING,
    NotFound,
    SavedModel,
    SavedModels,
    describe_saved,
    format_time,
)

_LEFT = "left"
"""The name under which a model is saved whose client has gone."""
_SILENCE_SECONDS = 300.0
"""Clients beat every 10 seconds, and warn their users after 120 without an answer."""


@dataclasses.dataclass(frozen=True)
class Served:
    """The model that a service has, and its limits."""

    base_model: str
    folder: Path
    longest: int
    lora_rank: int
    most_models: int
    needs_provenance: bool
    decode: sampling.Decode
    last_version: int
    """The last version that an earlier life has published."""


@dataclasses.dataclass
class ClientSession:
    identity: str
    owner: str
    heard: float = dataclasses.field(default_factory=time.monotonic)
    """The time of the last sign of the client."""
    models: dict[int, Future] = dataclasses.field(default_factory=dict)
    samplers: dict[int, "SamplerState"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Model:
    identity: str
    session: str
    owner: str
    order: ModelLine
    metadata: Any = None
    num_steps: int = 0
    touched: float = dataclasses.field(default_factory=time.time)
    unnamed: list[str] = dataclasses.field(default_factory=list)
    samplers: "list[SamplerState]" = dataclasses.field(default_factory=list)
    """The samplers of its unnamed weights."""
    loads: list[int] = dataclasses.field(default_factory=list)
    """Its steps after each load: sequences of later steps from before a load no longer belong to it."""


@dataclasses.dataclass
class SamplerState:
    """Weights that a client samples from: those kept under the name, or the base's.

    Its client may know it from an earlier life of the service, and ask before this one has made it again.
    """

    identity: str
    owner: str
    name: str | None = None
    model: str | None = None
    num_steps: int = 0
    branch: int = 0
    path: str | None = None
    failure: Exception | None = None
    is_made: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


@dataclasses.dataclass(frozen=True)
class Restored:
    """The parts of an earlier life from which a service begins."""

    answers: Mapping[str, Body]
    """The answers of futures, by their names."""
    checkpoints: Mapping[str, tuple[int, SavedModel]]
    """The last checkpoint of each model, and the number of the request that asked for it."""


class Front:
    def __init__(
        self, served: Served, ranks: Ranks, engines: Samplers, record: SequenceRecord, note: Callable[[Future], None]
    ) -> None:
        """Make it; `note` writes the answer of a future down."""
        self.served = served
        self.ranks = ranks
        self.futures = Futures(note)
        self._restored: Mapping[str, tuple[int, SavedModel]] = {}
        self._engines = engines
        self._record = record
        self._turns = sampling.WeightTurns(ranks, served.last_version)
        self._sessions: dict[str, ClientSession] = {}
        self._by_idempotency: dict[tuple[str, str], str] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplerState] = {}
        self._sampled: dict[tuple[str, int], tuple[Future, list[str]]] = {}
        """The last requests of samplers, whose repetition has their answer."""
        self._kept = itertools.count()
        self._mark = secrets.token_hex(3)
        self._making_room = asyncio.Lock()
        self._kept_names: list[str] = []
        """The names under which ranks keep weights of checkpoints."""
        self.saved = SavedModels(served.folder / "models")

    def restore(self, restored: "Restored") -> None:
        """Give the requests that come now their answers of an earlier life, and begin models where they were saved."""
        self.futures.known_answers, self._restored = restored.answers, restored.checkpoints

    def create_session(self, owner: str, idempotency: str, identity: str) -> str:
        key = owner, idempotency
        if not idempotency or key not in self._by_idempotency:
            self._sessions[identity] = ClientSession(identity, owner)
            self._by_idempotency[key] = identity
        return self._by_idempotency[key]

    def has_session(self, identity: str, owner: str) -> bool:
        return identity in self._sessions and self._sessions[identity].owner == owner

    def find_session(self, identity: str, owner: str) -> ClientSession:
        session: ClientSession = _find(self._sessions, identity, owner, "session")
        session.heard = time.monotonic()
        return session

    def find_model(self, identity: str, owner: str) -> Model:
        model = _find(self._models, identity, owner, "model")
        model.touched = time.time()
        return model

    def find_sampler(self, identity: str, owner: str) -> SamplerState:
        return _find(self._samplers, identity, owner, "sampler")

    def list_models(self, owner: str) -> list[Model]:
        return [one for one in self._models.values() if one.owner == owner]

    def check_base(self, name: str) -> None:
        if name != self.served.base_model:
            raise InputError(
                f"the base model {name!r} is not served; {self.served.base_model!r} is, and --serve-base-model names it"
            )

    # Models

    def create_model(
        self, session: ClientSession, number: int, lora: Mapping[str, Any] | None, metadata: Any, name: str
    ) -> Future:
        seed = (lora or {}).get("seed") or 0
        if not isinstance(seed, int) or not 0 <= seed < 1 << 31:
            raise InputError(f"the seed {seed!r} must be a whole number below {1 << 31}")

        async def create(model: Model) -> None:
            self._check_adapters(lora)
            await self.ranks.do(work.Create(model=model.identity, seed=seed))

        return self._begin_model(session, number, metadata, create, name)

    def load_model(
        self, session: ClientSession, number: int, path: str, has_optimizer: bool, metadata: Any, name: str
    ) -> Future:
        async def load(model: Model) -> None:
            await self._load(model, path, has_optimizer)

        return self._begin_model(session, number, metadata, load, name)

    def _begin_model(
        self, session: ClientSession, number: int, metadata: Any, make: Callable[[Model], Any], name: str
    ) -> Future:
        if number not in session.models:
            identity = f"{session.identity}:train:{number}"
            model = Model(identity, session.identity, session.owner, ModelLine(self.futures, session.owner), metadata)
            last, saved = self._restored.get(identity, (0, None))
            model.order.start_after(last)
            made = asyncio.Event()
            model.order.wait = made.wait
            # Requests of a model that is being made may follow at once.
            self._models[identity] = model

            async def perform() -> Body:
                try:
                    async with self._making_room:
                        if len(self._models) > self.served.most_models:
                            await self._put_away(identity)
                    if saved is None:
                        await make(model)
                    else:
                        await self._load(model, saved.path, has_optimizer=True)
                        model.loads = [*saved.loads]
                except BaseException as error:
                    self._models.pop(identity, None)
                    _end(model, f"{identity} was not made: {error}")
                    raise
                finally:
                    made.set()
                return to_json({"model_id": identity, "path": None})

            session.models[number] = self.futures.begin(session.owner, perform, name)
        return session.models[number]

    async def _put_away(self, new: str) -> None:
        """Save and forget the model whose client was silent for longest; raise an error if none was silent for long."""
        others = [one for one in self._models.values() if one.identity != new]
        model = min(others, key=lambda one: self._sessions[one.session].heard)
        if time.monotonic() - self._sessions[model.session].heard < _SILENCE_SECONDS:
            raise InputError(
                f"{len(others)} models are trained here, and --serve-most-models allows no more: end a session"
            )
        await self.save(model, TRAINING, _LEFT, 0, None, model.metadata, overwrite=True)
        self._models.pop(model.identity, None)
        _end(model, f"{model.identity} was put away, since its client was silent: load {_LEFT}")
        await self.ranks.do(work.Forget(names=[model.identity, *model.unnamed]))

    def _check_adapters(self, lora: Mapping[str, Any] | None) -> None:
        wanted, own = (lora or {}).get("rank"), self.served.lora_rank
        if own and wanted is None:
            raise InputError(
                f"this service trains adapters of rank {own}: ask for them, or start it without --lora-rank"
            )
        if wanted is not None and wanted != own:
            has = f"adapters of rank {own}" if own else "all weights"
            raise InputError(
                f"adapters of rank {wanted} are asked for, and this service trains {has}: ask for that, or start it "
                f"with --lora-rank {wanted}"
            )
        parts = {name: (lora or {}).get(name, True) for name in ("train_mlp", "train_attn")}
        if not all(parts.values()):
            raise InputError(f"{', '.join(parts)} must be true: --lora-targets says which layers have adapters")

    def end_session(self, session: ClientSession) -> None:
        """Forget a session with its models and samplers; checkpoints stay."""
        del self._sessions[session.identity]
        self._by_idempotency = {key: one for key, one in self._by_idempotency.items() if one != session.identity}
        gone = [one for one in self._models.values() if one.session == session.identity]
        for sampler in session.samplers.values():
            self._samplers.pop(sampler.identity, None)
        if gone:
            self.unload(gone, f"the session {session.identity} is over")

    def unload(self, models: Sequence[Model], reason: str, name: str | None = None) -> Future:
        """Forget models at once; what waits for them fails for this reason."""
        names = []
        for model in models:
            self._models.pop(model.identity)
            _end(model, reason)
            names += [model.identity, *model.unnamed]
        return self.futures.begin(models[0].owner, lambda: self._forget(names, models[0].identity), name)

    async def _forget(self, names: list[str], model: str) -> Body:
        await self.ranks.do(work.Forget(names=names))
        return to_json({"type": "unload_model", "model_id": model})

    async def train(self, model: Model, body: bytes) -> Body:
        inputs = {name: loss.inputs for name, loss in LOSSES.items()}
        request = protobuf.read_pass(body, inputs)
        known = LOSSES[request.loss].settings
        if wrong := sorted(request.settings.keys() - set(known)):
            raise InputError(
                f"the loss {request.loss} reads {', '.join(known) or 'no settings'}, and not {', '.join(wrong)}"
            )
        bearer = Bearer(model.owner, model.identity, model.num_steps, tuple(model.loads))
        is_required = self.served.needs_provenance and not request.is_forward_only
        metrics = self._record.check(request.data, request.claims, bearer, is_required)
        data = request.data
        if not request.is_forward_only:
            loss = LOSSES[request.loss]
            data = [mark_own(datum, one, loss) for datum, one in zip(data, request.claims, strict=True)]
        computed = await self.ranks.do(
            work.Pass(
                model=model.identity,
                data=data,
                loss=request.loss,
                settings=request.settings,
                is_forward_only=request.is_forward_only,
            )
        )
        assert isinstance(computed, work.PassDone)
        sums = {f"{name}:sum": value for name, value in computed.sums.items()}
        return Body(protobuf.write_pass(request.trailing, computed.log_probs, {**sums, **metrics}), protobuf.MEDIA_TYPE)

    async def step(self, model: Model, adam: Mapping[str, Any]) -> Body:
        # Those of the client's own class.
        defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        defaults |= {"weight_decay": 0.0, "grad_clip_norm": 0.0}
        if adam.get("type", "adamw") != "adamw":
            raise InputError(f"the optimizer {adam['type']!r} is not served: adamw is")
        values = {name: float(adam.get(name, value)) for name, value in defaults.items()}
        if not all(np.isfinite(value) and value >= 0 for value in values.values()):
            raise InputError(f"{values} must be finite and at least 0")
        stepped = await self.ranks.do(
            work.Step(
                model=model.identity,
                learning_rate=values["learning_rate"],
                beta1=values["beta1"],
                beta2=values["beta2"],
                epsilon=values["eps"],
                weight_decay=values["weight_decay"],
                clip=values["grad_clip_norm"],
            )
        )
        assert isinstance(stepped, work.StepDone)
        model.num_steps = stepped.num_steps
        return to_json({"metrics": {"grad_norm:mean": stepped.gradient_norm, "num_steps:max": stepped.num_steps}})

    # Checkpoints

    async def save(
        self, model: Model, kind: str, name: str, number: int, ttl: int | None, metadata: Any, overwrite: bool
    ) -> Body:
        path = f"{SCHEME}{model.identity}/{kind}/{name}"
        there = self.saved.read(path)
        if there is not None and number and there.number == number:
            # An earlier life has done this request, and ended before its answer was written down.
            return to_json({"path": path})
        if there is not None and not overwrite:
            raise InputError(f"{path} exists: write another name, or overwrite it")
        folder = self.saved.stage(path)
        await self.ranks.do(work.Save(model=model.identity, folder=str(folder / STATE)))
        kept = f"{path}#{self._mark}-{next(self._kept)}"
        if kind == SAMPLER:
            await self._keep(model, kept)
        now = time.time()
        checkpoint = SavedModel(
            path=path,
            model=model.identity,
            owner=model.owner,
            kind=kind,
            base_model=self.served.base_model,
            lora_rank=self.served.lora_rank,
            num_steps=model.num_steps,
            loads=model.loads,
            number=number,
            time=now,
            expires=None if ttl is None else now + ttl,
            metadata=metadata,
            kept=kept,
        )
        self.saved.finish(checkpoint)
        return to_json({"path": path})

    async def _keep(self, model: Model, name: str) -> None:
        """Keep a model's weights under the name of a checkpoint, in place of the one that was kept first."""
        await self.ranks.do(work.Keep(model=model.identity, name=name))
        await self._note_kept(name)

    async def _note_kept(self, name: str) -> None:
        self._kept_names.append(name)
        if len(self._kept_names) > MOST_NAMED:
            await self.ranks.do(work.Forget(names=[self._kept_names.pop(0)]))

    async def load(self, model: Model, path: str, has_optimizer: bool) -> Body:
        await self._load(model, path, has_optimizer)
        return to_json({"path": path, "model_id": model.identity})

    async def _load(self, model: Model, path: str, has_optimizer: bool) -> None:
        self.saved.find(path, model.owner)
        folder = self.saved.find_folder(path) / STATE
        done = await self.ranks.do(work.Load(model=model.identity, folder=str(folder), has_optimizer=has_optimizer))
        assert isinstance(done, work.Done)
        model.num_steps = done.num_steps
        model.loads.append(done.num_steps)

    async def delete_checkpoint(self, checkpoint: SavedModel) -> None:
        shutil.rmtree(self.saved.find_folder(checkpoint.path))
        if checkpoint.kept in self._kept_names:
            self._kept_names.remove(checkpoint.kept)
            await self.ranks.do(work.Forget(names=[checkpoint.kept]))

    def describe_run(self, identity: str, owner: str) -> dict[str, Any]:
        model, saved = self._models.get(identity), self.saved.list_of(owner, identity)
        if not saved and (model is None or model.owner != owner):
            raise NotFound(f"the training run {identity} does not exist")
        last = {kind: [one for one in saved if one.kind == kind][-1:] for kind in KINDS}
        described: dict[str, Any] = {
            "training_run_id": identity,
            "base_model": self.served.base_model,
            "model_owner": owner,
            "is_lora": bool(self.served.lora_rank),
            "corrupted": False,
            "lora_rank": self.served.lora_rank or None,
            "last_request_time": format_time(saved[-1].time if model is None else model.touched),
            "last_checkpoint": next(map(describe_saved, last[TRAINING]), None),
            "last_sampler_checkpoint": next(map(describe_saved, last[SAMPLER]), None),
            "user_metadata": saved[-1].metadata if model is None else model.metadata,
        }
        return {name: value for name, value in described.items() if value is not None}

    # Sampling

    async def keep_unnamed(self, model: Model, sampler: SamplerState) -> Body:
        """Keep a model's weights for a sampler that has no path."""
        if not sampler.is_made.is_set():
            try:
                await self._keep_unnamed(model, sampler)
            except Exception as error:
                sampler.failure = error
                raise
            finally:
                sampler.is_made.set()
        return to_json({"sampling_session_id": sampler.identity})

    async def _keep_unnamed(self, model: Model, sampler: SamplerState) -> None:
        name = f"{self._mark}-{next(self._kept)}"
        await self.ranks.do(work.Keep(model=model.identity, name=name))
        sampler.name, sampler.model = name, model.identity
        sampler.num_steps, sampler.branch = model.num_steps, len(model.loads)
        model.unnamed.append(name)
        old, model.unnamed = model.unnamed[:-MOST_UNNAMED], model.unnamed[-MOST_UNNAMED:]
        if old:
            await self.ranks.do(work.Forget(names=old))

    def create_sampler(self, session: ClientSession, number: int, path: str | None) -> SamplerState:
        if number in session.samplers:
            return session.samplers[number]
        checkpoint = None if path is None else self.saved.find(path, session.owner)
        if checkpoint is not None and checkpoint.kind != SAMPLER:
            raise InputError(f"{path} was saved for training: save weights for a sampler")
        sampler = self.add_sampler(session, number)
        if checkpoint is not None:
            sampler.name, sampler.path, sampler.model = checkpoint.kept, path, checkpoint.model
            sampler.num_steps, sampler.branch = checkpoint.num_steps, len(checkpoint.loads)
        sampler.is_made.set()
        return sampler

    def add_sampler(self, session: ClientSession, number: int) -> SamplerState:
        """Add a sampler of this number, unless there is one; its weights are not known yet."""
        if number in session.samplers:
            return session.samplers[number]
        sampler = SamplerState(f"{session.identity}:sample:{number}", session.owner)
        session.samplers[number] = self._samplers[sampler.identity] = sampler
        return sampler

    def sample(
        self, sampler: SamplerState, number: int, wanted: sampling.Wanted, has_prompt: bool
    ) -> tuple[Future, list[str]]:
        """Begin to sample; return the future, and the names that the sequences will have."""
        key = sampler.identity, number
        if key not in self._sampled:
            names = [f"{sampler.identity}:{number}:{index}" for index in range(wanted.num_samples)]

            async def perform() -> Body:
                return await self._sample(sampler, wanted, names, has_prompt)

            self._sampled[key] = self.futures.begin(sampler.owner, perform), names
            if len(self._sampled) > MOST_KNOWN:
                del self._sampled[next(iter(self._sampled))]
        return self._sampled[key]

    async def _sample(
        self, sampler: SamplerState, wanted: sampling.Wanted, names: Sequence[str], has_prompt: bool
    ) -> Body:
        sampling.check_fits(wanted, self.served.longest)
        await sampler.is_made.wait()
        if sampler.failure is not None:
            raise sampler.failure
        room = self.served.longest - len(wanted.prompt)
        if sampler.path is not None and sampler.name not in self._kept_names:
            await self._recall(sampler)
        wanted = dataclasses.replace(wanted, max_tokens=min(wanted.max_tokens, room))
        async with self._turns.holding(sampler.name) as held:
            responses = await sampling.sample(self._engines, wanted, names[0], self.served.decode)
        for name, response in zip(names, responses, strict=True):
            self._note(sampler, held, name, wanted, response)
        log_probs = None
        if has_prompt:
            prompt = wanted.prompt.astype("<i4").tobytes()
            computed = await self.ranks.do(work.Score(name=sampler.name, sequences=[prompt]))
            assert isinstance(computed, work.PassDone)
            log_probs = np.append(np.float32(np.nan), np.frombuffer(computed.log_probs[0], "<f4"))
        return Body(protobuf.write_samples(responses, log_probs), protobuf.MEDIA_TYPE)

    async def _recall(self, sampler: SamplerState) -> None:
        """Have the ranks read a sampler's weights again."""
        assert sampler.path is not None and sampler.name is not None
        self.saved.find(sampler.path, sampler.owner)
        async with self._making_room:
            if sampler.name not in self._kept_names:
                folder = self.saved.find_folder(sampler.path) / STATE
                await self.ranks.do(work.Recall(name=sampler.name, folder=str(folder)))
                await self._note_kept(sampler.name)

    def _note(
        self, sampler: SamplerState, held: sampling.Held, name: str, wanted: sampling.Wanted, response: Response
    ) -> None:
        tags = {span.version for span in response.spans}
        if response.fingerprint != held.fingerprint or tags != {str(held.version)}:
            raise MegatronRLError(
                f"engine {response.engine} answered with version {', '.join(sorted(tags))} and the fingerprint "
                f"{response.fingerprint[:12]}, and {held.version} with {held.fingerprint[:12]} was asked for"
            )
        self._record.add(
            Sampled(
                identity=name,
                owner=sampler.owner,
                model=sampler.model,
                num_steps=sampler.num_steps,
                version=held.version,
                fingerprint=held.fingerprint,
                engine=response.engine,
                seed=response.seed,
                branch=sampler.branch,
                temperature=wanted.temperature,
                prompt=wanted.prompt.astype("<i4").tobytes(),
                tokens=response.tokens,
                log_probs=response.log_probs,
            )
        )


def derive_seed(sampler: str, number: int) -> int:
    """Derive the seed of a request that has none, so that a repeated one samples the same."""
    digest = hashlib.sha256(f"{sampler} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _end(model: Model, reason: str) -> None:
    """Fail what waits for a model's turn."""
    model.order.end(reason)
    for sampler in model.samplers:
        if not sampler.is_made.is_set():
            sampler.failure = MegatronRLError(reason)
            sampler.is_made.set()


def _find(known: Mapping[str, Any], identity: str, owner: str, what: str) -> Any:
    found = known.get(identity)
    # Another key's is as if it were not there.
    if found is None or found.owner != owner:
        raise NotFound(f"the {what} {identity} does not exist")
    return found
