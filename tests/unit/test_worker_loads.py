"""The loads of weights by a worker: what is proved, refused, and reported, with a stand-in for the model."""

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import FileSource
from megatron_rl.shared.weights.files import read_digests, write_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.offer import write_offer
from megatron_rl.sidecar.engines import EngineRefused, WeightsNotWritten, WrongWeights
from megatron_rl.sidecar.vllm.held import LoadProof, NotHeld
from megatron_rl.sidecar.vllm.held_model import HeldModel
from megatron_rl.sidecar.vllm.in_place import Places
from megatron_rl.sidecar.vllm.parts import encode_places
from megatron_rl.sidecar.vllm.received import NotWritten, Refusal, list_specs
from megatron_rl.sidecar.vllm.routes import WorkersCall
from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered
from tests.offers import HostSharing, Ranks
from tests.sidecar.mock_server import connect, connect_always, reply
from tests.unit.test_streams import (
    DIGESTS,
    FINGERPRINT,
    FROM_FILES,
    LOADED,
    NOT_COMPARED,
    SPECS,
    TENSORS,
    WEIGHTS,
)


class Model(torch.nn.Module):
    """Two parameters, loaded as vLLM's models load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(1, 5, dtype=torch.bfloat16)
        self.b = torch.nn.Linear(4, 3, bias=False)
        del self.a.weight

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def worker(tmp_path, model=None, rank: int = 0, world_size: int = 1) -> WorkerExtension:
    """Build a worker around a model, whose checkpoint lies in a folder, with the digests of a publish beside it."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_digests(tmp_path, DIGESTS)
    (tmp_path / "config.json").write_text('{"model_type": "made_up"}')
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    worker = WorkerExtension()
    model = model or Model()

    class Holder:
        def get_model(self):
            return model

    class Config:
        class model_config:
            model = str(tmp_path)
            quantization = None
            dtype = torch.float32

        class parallel_config:
            pass

    Config.parallel_config.world_size = world_size
    worker.rank, worker.vllm_config, worker.model_runner = rank, Config, Holder()
    worker.reload_weights = lambda weights_iterator: model.load_weights(weights_iterator)
    return worker


def test_a_stream_is_digested_on_its_way_into_the_model(tmp_path):
    model = Model()
    extension = worker(tmp_path, model)
    assert extension.megatron_rl_begin_stream() == {}
    assert extension.megatron_rl_report() == {"fingerprint": ""}
    for name, tensor in TENSORS.items():
        model.load_weights([(name, tensor)])
    assert extension.megatron_rl_end_stream(FINGERPRINT) == NOT_COMPARED
    assert extension.megatron_rl_report() == {"fingerprint": FINGERPRINT}
    assert torch.equal(model.b.weight, TENSORS["b.weight"])
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize("sent", [["b.weight"], []])
def test_a_stream_that_breaks_off_leaves_a_worker_that_claims_nothing(tmp_path, sent):
    model = Model()
    extension = worker(tmp_path, model)
    extension.megatron_rl_begin_stream()
    model.load_weights([(name, TENSORS[name]) for name in sent])
    assert "was announced" in extension.megatron_rl_end_stream(FINGERPRINT)["error"]
    assert extension.megatron_rl_report() == {"fingerprint": ""}
    assert "has to be started again" in extension.megatron_rl_begin_stream()["error"]


def load(extension: WorkerExtension, folder: Path, expected: str = FINGERPRINT) -> dict:
    return extension.megatron_rl_load(encode_places([(str(folder), os.getuid())]), expected)


def check_files(extension: WorkerExtension, folder: Path, *more: str) -> dict:
    return extension.megatron_rl_check_files(encode_places([(str(folder), os.getuid())]), *TENSORS, *more)


def test_every_worker_loads_all_of_the_files(tmp_path):
    for rank in range(2):
        assert load(worker(tmp_path, rank=rank, world_size=2), tmp_path) == LOADED


def copying_worker(tmp_path) -> tuple[WorkerExtension, list[str]]:
    """Build a worker that copies weights in place; the list gets a word for each load that vLLM does."""
    extension, loads = worker(tmp_path), []
    reload = extension.reload_weights

    def load_by_vllm(weights_iterator):
        loads.append("vLLM")
        reload(weights_iterator)

    extension.megatron_rl_held.in_place_on = ("cpu",)
    assert extension.megatron_rl_learn_order() == {"unknown": [], "obstacles": []}
    extension.reload_weights = load_by_vllm
    return extension, loads


def test_a_worker_copies_files_in_place_once_it_has_learned_where_tensors_lie(tmp_path):
    extension, loads = copying_worker(tmp_path)
    model = extension.model_runner.get_model()
    assert not torch.equal(model.b.weight, TENSORS["b.weight"])
    assert extension.megatron_rl_reload_checkpoint() == {"reloaded": True, "obstacles": []}
    assert torch.equal(model.b.weight, TENSORS["b.weight"])
    model.b.weight.data.zero_()
    assert load(extension, tmp_path) == FROM_FILES | {"obstacles": []}
    assert torch.equal(model.b.weight, TENSORS["b.weight"])
    assert torch.equal(model.a.bias, TENSORS["a.bias"])
    assert loads == []
    assert extension.megatron_rl_report() == {"fingerprint": FINGERPRINT}


def test_a_worker_has_vllm_load_what_a_copy_would_round_and_names_it(tmp_path):
    extension, loads = copying_worker(tmp_path)
    answer = load(extension, tmp_path, put(tmp_path, TENSORS | {"a.bias": torch.full((5,), 1 + 2.0**-20)}))
    assert answer["obstacles"] == ["1 parameters are narrower than their tensors: a.bias"]
    assert (answer["compared"], answer["uncompared"], loads) == (1, ("a.bias",), ["vLLM"])


@pytest.mark.parametrize("by", ["a reason", "a reload", "its device", "its quantization"])
def test_a_worker_leaves_loads_to_vllm_for_a_reason_that_it_gives(tmp_path, by):
    extension, loads = copying_worker(tmp_path)
    obstacles = []
    if by == "a reason":
        assert extension.megatron_rl_leave_loads_to_vllm("the reason") == {}
        obstacles = ["the reason"]
    elif by == "its device":
        extension.megatron_rl_held.in_place_on = HeldModel.in_place_on
        obstacles = ["its device type is cpu"]
    elif by == "its quantization":
        extension.vllm_config.model_config.quantization = "fp8"
        obstacles = ["it quantizes its weights (fp8)"]
    if by.startswith("its"):
        assert extension.megatron_rl_learn_order() == {"unknown": [], "obstacles": obstacles}
    answer = extension.megatron_rl_reload_checkpoint("vllm" if by == "a reload" else "")
    assert answer == {"reloaded": True, "obstacles": obstacles}
    assert loads == ["vLLM"]
    assert load(extension, tmp_path)["obstacles"] == obstacles
    assert loads == ["vLLM"] * (1 + bool(obstacles))


def test_each_load_in_place_is_proved_by_what_the_parameters_hold_then_wherever_they_lie(tmp_path, monkeypatch):
    extension, loads = copying_worker(tmp_path)
    model = extension.model_runner.get_model()
    for version in range(1, 3):
        expected = put_version(tmp_path, version)
        assert load(extension, tmp_path, expected)["compared"] == 2
        # Another load of vLLM's may move the parameters.
        model.b.weight.data = model.b.weight.data.clone()
    monkeypatch.setattr(Places, "put", lambda *_: None)
    answer = load(extension, tmp_path, put_version(tmp_path, 3))
    assert (answer["code"], answer["error"].partition(":")[0]) == (
        "wrong weights", "2 tensors do not hold the numbers that were given",
    )  # fmt: skip
    assert extension.megatron_rl_report() == {"fingerprint": ""}
    assert loads == []


def test_a_worker_reads_files_if_it_would_have_to_digest_what_others_hold(tmp_path):
    extension, _ = copying_worker(tmp_path)
    held = extension.megatron_rl_held
    held.find_sharing = HostSharing
    held.order = dataclasses.replace(held.order, rows={"a.bias": held.order.rows["a.bias"]})
    ranks = Ranks({name: tensor.float() for name, tensor in TENSORS.items()})
    write_offer(tmp_path, ranks.offer(FINGERPRINT))
    answer = load(extension, tmp_path)
    assert answer["through"] == "files"
    assert "1 tensors are held by other workers: b.weight" in answer["reasons"]


def put_version(folder: Path, version: int) -> str:
    """Write other numbers with their digests; return their fingerprint."""
    return put(folder, {name: tensor + version for name, tensor in TENSORS.items()})


def test_a_worker_reports_no_version_that_its_parameters_do_not_hold(tmp_path):
    """Offer memory that is not copied, then stream tensors that the model does not take over."""
    extension, _ = copying_worker(tmp_path)
    assert load(extension, tmp_path)["compared"] == 2
    expected = put_version(tmp_path, 1)
    extension.megatron_rl_held.memory = SimpleNamespace(copy=lambda opened, places: None)
    with pytest.raises(NotHeld, match="were copied from the trainer's devices; --publish-through files"):
        extension.megatron_rl_held.load_offered(SimpleNamespace(specs=SPECS), read_digests(tmp_path), expected)
    assert extension.megatron_rl_report() == {"fingerprint": ""}
    model = extension.model_runner.get_model()
    type(model).load_weights, takes = lambda model, weights: {name for name, _ in weights}, type(model).load_weights
    try:
        extension.megatron_rl_begin_stream()
        model.load_weights((name, tensor + 1) for name, tensor in TENSORS.items())
        assert "do not hold the numbers that were given" in extension.megatron_rl_end_stream(expected)["error"]
    finally:
        type(model).load_weights = takes
    assert extension.megatron_rl_report() == {"fingerprint": ""}


@pytest.mark.parametrize("is_compared", [True, False])
def test_tensors_that_came_with_other_numbers_are_not_taken_for_what_a_model_holds_wrongly(tmp_path, is_compared):
    extensions = [worker(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    put_wrong_files(tmp_path)
    if not is_compared:
        for extension in extensions:
            extension.megatron_rl_held.learn = lambda specs: None
    answers = [load(extension, tmp_path) for extension in extensions]
    refused = [answer for answer in answers if "error" in answer]
    # If the held tensors prove nothing, each tensor is digested by one worker.
    assert len(refused) == (2 if is_compared else 1)
    for extension, answer in zip(extensions, answers, strict=True):
        assert extension.megatron_rl_report()["fingerprint"] == ("" if "error" in answer else FINGERPRINT)
    for answer in refused:
        assert answer == {
            "error": "1 tensors do not match the digests sent with them: b.weight",
            "code": "refused",
        }


def put_wrong_files(folder: Path) -> None:
    save_file(TENSORS | {"b.weight": TENSORS["b.weight"] + 1}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o600)


def test_a_tensor_that_one_worker_cannot_prove_is_digested_though_another_proves_a_different_one(tmp_path):
    """Have the second worker prove the first tensor: the share of each worker must not depend on that."""
    extensions = [worker(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    put_wrong_files(tmp_path)
    for extension, proved in zip(extensions, ([], ["a.bias"]), strict=True):
        proof = LoadProof(0, 2, ("a.bias", "b.weight"), {}, (), frozenset(proved))
        extension.megatron_rl_held.compare = lambda record, digests, proof=proof: proof
    answers = [load(extension, tmp_path) for extension in extensions]
    assert ["error" in answer for answer in answers] == [False, True]


def test_files_are_checked_by_all_workers_together(tmp_path):
    extensions = [worker(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for extension in extensions:
        assert check_files(extension, tmp_path, "a.weight of a base") == {}
    put_wrong_files(tmp_path)
    answers = [check_files(extension, tmp_path) for extension in extensions]
    assert answers == [
        {}, {"error": "1 tensors do not match the digests sent with them: b.weight", "code": "refused"},
    ]  # fmt: skip


@pytest.mark.parametrize("are_files_right", [True, False])
def test_a_tensor_that_workers_hold_wrongly_together_is_laid_to_the_engine_only_if_its_file_is_right(are_files_right):
    shares = {"b.weight": {"whole": [3, 3], "parts": [((0, 0, 1, 4), [1, 1])]}}
    refusal = {"error": "1 tensors do not match the digests sent with them: b.weight", "code": "refused"}
    called = []

    def answer(request):
        call = msgspec.msgpack.decode(request.content, type=WorkersCall)
        called.append((call.method, call.arguments[1:]))
        if call.method == "megatron_rl_load":
            return reply([FROM_FILES | {"obstacles": [], "shares": shares}])
        return reply([{} if are_files_right else refusal])

    weights = msgspec.structs.replace(WEIGHTS, source=FileSource(folder="/folder"))
    with pytest.raises(WrongWeights if are_files_right else EngineRefused, match="b.weight") as caught:
        asyncio.run(connect(answer).load(weights))
    assert type(caught.value) is (WrongWeights if are_files_right else EngineRefused)
    assert called[1:] == [("megatron_rl_check_files", ["b.weight"])]


def test_a_tensor_that_a_held_one_proves_is_not_digested_again(tmp_path, monkeypatch):
    digested = []

    def counted(tensor, *place):
        digested.append(tensor.shape)
        return digest(tensor, *place)

    extension = worker(tmp_path)
    load(extension, tmp_path)
    monkeypatch.setattr("megatron_rl.sidecar.vllm.received.digest", counted)
    assert load(extension, tmp_path) == LOADED
    assert digested == []


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write tensors with their digests; return their fingerprint."""
    specs = list_specs(tensors)
    digests = {name: digest(tensor).tolist() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o600)
    write_digests(folder, digests)
    return compute_fingerprint(specs, digests)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b.weight": None}, "1 tensors are missing: b.weight"),
        ({"c.weight": torch.ones(2)}, "1 tensors are not in this model: c.weight"),
        ({"b.weight": torch.ones(4, 3)}, "1 tensors are of another shape: b.weight"),
        # A tied output layer may be stored twice.
        ({"lm_head.weight": torch.ones(9, 9)}, None),
    ],
    ids=str,
)
def test_tensors_must_be_those_of_the_checkpoint_that_the_engine_started_from(tmp_path, changes, message):
    (tmp_path / "version").mkdir(mode=0o700)
    model = Model()
    extension = worker(tmp_path, model)
    tensors = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    expected = put(tmp_path / "version", tensors)
    (tmp_path / "version" / "digests.json").chmod(0o600)
    if message is None:
        extension.megatron_rl_held.check_complete(list_specs(tensors))
        return
    answer = load(extension, tmp_path / "version", expected)
    assert answer == {"error": message, "code": "refused"}
    assert not torch.equal(model.a.bias, TENSORS["a.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "digests.json").unlink(), "digests.json cannot be read"),
        (lambda folder: (folder / "digests.json").write_text("{"), "digests.json cannot be read"),
        (lambda folder: (folder / "digests.json").write_text('{"b.weight": [1, 2]}'), "came without a digest: a.bias"),
        (lambda folder: write_digests(folder, DIGESTS | {"a.bias": [1, 2]}), "the weights received have fingerprint"),
        (lambda folder: (folder / "model.safetensors").chmod(0o644), "model.safetensors must be private to user"),
    ],
    ids=["no digests", "half a file", "one digest", "another digest", "open to others"],
)
def test_files_that_do_not_fit_are_refused_before_a_weight_is_touched(tmp_path, change, message):
    model = Model()
    extension = worker(tmp_path, model)
    change(tmp_path)
    answer = load(extension, tmp_path)
    assert message in answer["error"]
    assert answer["code"] == "refused"
    assert not torch.equal(model.b.weight, TENSORS["b.weight"])


def test_a_worker_whose_load_broke_off_in_the_model_must_be_restarted(tmp_path):
    class Breaks(Model):
        def load_weights(self, weights):
            next(iter(weights))
            raise RuntimeError("out of memory")

    extension = worker(tmp_path, Breaks())
    for attempt in range(2):
        if attempt == 0:
            with pytest.raises(RuntimeError, match="out of memory"):
                load(extension, tmp_path)
        else:
            assert "has to be started again" in load(extension, tmp_path)["error"]
    assert extension.megatron_rl_report() == {"fingerprint": ""}


def test_parameters_that_the_model_did_not_load_are_found(tmp_path):
    class Skips(Model):
        def load_weights(self, weights):
            return {name for name, _ in weights} - {"a.bias"}

    extension = worker(tmp_path, Skips())
    answer = load(extension, tmp_path)
    assert answer["error"] == "1 parameters were not loaded: a.bias"
    assert extension.megatron_rl_report() == {"fingerprint": ""}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(NotHeld, WrongWeights), (NotWritten, WeightsNotWritten), (Refusal, EngineRefused), (InputError, EngineRefused)],
)
def test_an_engine_tells_refusals_apart_after_their_classes_were_renamed(kind, expected):
    renamed = type("Renamed", (kind,), {})

    def refuse(self):
        raise renamed("the reason")

    answer = json.loads(json.dumps(answered(refuse)(None)))
    with pytest.raises(expected, match="^engine engine-0, worker 0, load: the reason$") as caught:
        call_workers([answer])
    assert type(caught.value) is expected


def test_a_refusal_with_an_unknown_code_is_an_error_that_says_so():
    with pytest.raises(
        EngineRefused, match="the reason .code 'odd' is unknown: run the same megatron_rl on both sides"
    ):
        call_workers([{"error": "the reason", "code": "odd"}])


def call_workers(answers):
    """Have an engine call workers that give these answers."""
    return asyncio.run(connect_always(answers)._workers("load", "megatron_rl_load"))
