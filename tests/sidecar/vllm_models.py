"""Small models for real engines, publishes of them, and transformers' log-probs of their responses."""

import asyncio
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.shared.protocol.wire import FileSource, Response, Sampling, Weights, decode_log_probs, decode_tokens
from megatron_rl.shared.weights.files import write_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.stored_forms import split_stored
from megatron_rl.sidecar.engines import Engine, GroupRequest, WeightReport
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.received import list_specs, map_file_tensors
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests import hf_models
from tests.ranks import ROOT
from tests.truth import error_over_bound, everything_in

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512
PROBE = tuple(range(3, 35))
# vLLM wants heads of at least 32 on a CPU.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
# Few enough tokens a step that prompts of some hundreds are split.
CONFIG = ServerConfig(model="", max_model_len=MAX_MODEL_LEN, flags=("--max-num-batched-tokens", "128"))


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Models:
    """Two sets of weights of one architecture; engines start from the first."""

    first: Path
    second: Path


def draw(family: str, folder: Path, **changes: Any) -> Models:
    first, second = (hf_models.draw(family, folder / str(seed), seed, **{**SIZES, **changes}) for seed in (0, 1))
    return Models(first, second)


def round_to_bfloat16(folder: Path) -> None:
    """Round a model's weights where they lie."""
    path = folder / "model.safetensors"
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


def copy(model: Path, name: str) -> Path:
    """Copy a model beside it."""
    return Path(shutil.copytree(model, model.with_name(name)))


def rename(model: Path, family: str) -> Path:
    """Copy a model beside it, as a model of a family that transformers does not know."""
    renamed = copy(model, family)
    config = json.loads((renamed / "config.json").read_text())
    (renamed / "config.json").write_text(json.dumps({**config, "model_type": family}))
    return renamed


def draw_with_tokenizer(folder: Path, **changes: object) -> Path:
    """Draw one set of weights, with a word for each token: rewards see text."""
    hf_models.draw("qwen3", folder, **SIZES, **changes)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def configure(model: Path, extension: str, *paths: Path, **changes: Any) -> ServerConfig:
    """Configure an engine with a test's extension of workers, found in these paths, and the kernels of the tests."""
    # An engine does not inherit these from the sidecar.
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    kernels = {name: os.environ[name] for name in names if name in os.environ}
    return dataclasses.replace(
        CONFIG,
        model=str(model),
        flags=(*CONFIG.flags, *changes.pop("flags", ()), "--worker-extension-cls", extension),
        environment={"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), **kernels},
        **changes,
    )


@contextmanager
def created(run: Run, config: ServerConfig, name: str = "engine-0", logs: Path | None = None) -> Iterator[VllmEngine]:
    """Create an engine, and end it."""
    folder = make_socket_folder()
    engine = VllmFactory(config, folder, LocalLauncher(), logs=logs).create(name)
    try:
        yield engine
    finally:
        run(engine.close())
        shutil.rmtree(folder)


@contextmanager
def started(run: Run, config: ServerConfig, name: str = "engine-0") -> Iterator[VllmEngine]:
    with created(run, config, name) as engine:
        run(engine.start())
        yield engine


def put(run: Run, engine: VllmEngine, model: Path, version: int) -> list[float]:
    """Publish a model's weights; return the probe's log-probs."""
    with in_shared_memory(model, version) as weights:
        return run(publish(engine, weights))


def load(run: Run, engine: VllmEngine, weights: Weights) -> WeightReport:
    """Take a publish as far as the load."""

    async def attempt() -> WeightReport:
        await engine.pause()
        return await engine.load(weights)

    return run(attempt())


def generate(run: Run, engine: VllmEngine, *requests: GroupRequest) -> list[list[Response]]:
    """Sample groups at the same time."""

    async def all_of_them() -> list[list[Response]]:
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    return run(all_of_them())


@contextmanager
def in_shared_memory(model: Path, version: int) -> Iterator[Weights]:
    """Write the model's weights as the trainer's publisher leaves them: a private folder in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    try:
        for path in model.glob("*.safetensors"):
            # A trainer publishes the tensors of each expert, however files store them, and no vision model.
            stored = load_file(path)
            published = {name: tensor for name, tensor in stored.items() if not hf_models.is_of_tower(name)}
            tensors = dict(part for one in published.items() for part in split_stored(*one))
            if tensors.keys() == stored.keys():
                shutil.copyfile(path, folder / path.name)
            else:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / path.name)
            (folder / path.name).chmod(0o600)
        yield described(folder, version)
    finally:
        shutil.rmtree(folder)


def described(folder: Path, version: int) -> Weights:
    tensors = map_file_tensors(folder)
    digests = {name: digest(tensor).tolist() for name, tensor in tensors.items()}
    write_digests(folder, digests)
    return Weights(
        run="test",
        version=version,
        fingerprint=compute_fingerprint(list_specs(tensors), digests),
        dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        source=FileSource(folder=str(folder)),
    )


async def publish(engine: Engine, weights: Weights, probe: Sequence[int] = PROBE) -> list[float]:
    """Publish to one engine as the supervisor does; return the probe's log-probs."""
    await engine.pause()
    report = await engine.load(weights)
    assert (report.version, report.fingerprint) == (weights.version, weights.fingerprint)
    assert await engine.commit(report) == report
    report_of_probe = await engine.probe(probe)
    engine.open()
    return report_of_probe.log_probs


def request(number: int = 0, group_size: int = 1, length: int = 9, **sampling: Any) -> GroupRequest:
    """Return a group's request for a prompt of random tokens, which its number decides."""
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
    return GroupRequest(
        request_id=f"request-{number}",
        prompt_tokens=tuple(prompt),
        group_size=group_size,
        seed=1_000_000 * (number + 1),
        sampling=Sampling(**{"max_tokens": 16, **sampling}),
    )


class Reference:
    """The same weights in transformers, in float32 and in float64."""

    def __init__(self, folder: Path) -> None:
        self._models = {}
        for dtype in (torch.float32, torch.float64):
            with everything_in(dtype):
                self._models[dtype] = hf_models.load(folder, dtype)

    def num_greedy(self, request: GroupRequest, response: Response) -> int:
        """Count the response's tokens that transformers would have chosen in their place."""
        tokens = torch.from_numpy(decode_tokens(response.tokens).copy())
        return int((self._logits(request, response, torch.float64).argmax(-1) == tokens).sum())

    def error_over_bound(self, pairs: Iterable[tuple[GroupRequest, Response]]) -> float:
        """Return the error over its bound of the engine's log-probs, which are those of logits/T."""
        pairs = list(pairs)
        ours = [torch.from_numpy(decode_log_probs(response.log_probs).copy()) for _, response in pairs]
        theirs, truth = (torch.cat([self._log_probs(*pair, dtype) for pair in pairs]) for dtype in self._models)
        error = error_over_bound(torch.cat(ours), theirs, truth)
        print(f"log-probs of {len(truth)} tokens: error / bound: {error:.2f}")
        return error

    def _log_probs(self, request: GroupRequest, response: Response, dtype: torch.dtype) -> torch.Tensor:
        tokens = torch.from_numpy(decode_tokens(response.tokens).copy()).long()
        logits = self._logits(request, response, dtype) / request.sampling.temperature
        return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    def _logits(self, request: GroupRequest, response: Response, dtype: torch.dtype) -> torch.Tensor:
        ids = torch.tensor([[*request.prompt_tokens, *decode_tokens(response.tokens).tolist()]])
        with torch.no_grad(), everything_in(dtype):
            return self._models[dtype](ids).logits[0, len(request.prompt_tokens) - 1 : -1]
