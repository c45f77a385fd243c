"""The trainer's model on the ranks of one replica, with its parts recorded for responses that an engine sampled.

python -m megatron_rl.drift.trainer FOLDER

`compute` starts these ranks, and hands them a request in the folder. The model is the run's, but the tensor-parallel
ranks alone divide it: no stages, no parts of a sequence, no experts elsewhere. These change no part.
"""

import copy
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_rl import platforms
from megatron_rl.command_line.parse import parse_sizes
from megatron_rl.config.settings import Settings
from megatron_rl.drift.diagnosis import Recorded
from megatron_rl.errors import ExitCode, InputError, MegatronRLError
from megatron_rl.observe.run_folder import SavedConfig
from megatron_rl.shared.records.model_parts import LayerPart, ModelPart, Recording, join_ranks

_REQUEST, _ERROR = "request.json", "error.txt"


class _Sampled(msgspec.Struct, frozen=True):
    tokens: list[int]
    num_sampled: int
    temperature: float


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    words: Sequence[str]
    """The run's command line."""
    world_size: int
    """The number of the run's ranks."""
    checkpoint: str
    """The folder of the weights, in Hugging Face's format."""
    responses: list[_Sampled]


@dataclasses.dataclass(frozen=True)
class Computed:
    """Responses with the trainer's log-probs and recordings."""

    responses: list[Recorded]
    dtype: torch.dtype
    num_ranks: int


def compute(config: SavedConfig, checkpoint: Path, sampled: Sequence[Recorded]) -> Computed:
    """Compute sampled responses with the trainer's model of a run, and these weights."""
    responses = [_Sampled(list(one.tokens), len(one.log_probs), one.temperature) for one in sampled]
    request = _Request(
        words=config.words, world_size=config.num_devices or 1, checkpoint=str(checkpoint.resolve()),
        responses=responses,
    )  # fmt: skip
    transformer = config.sections["transformer"]
    num_ranks = int(transformer["tensor_model_parallel_size"].text)
    with tempfile.TemporaryDirectory(prefix="megatron-rl-drift-") as name:
        folder = Path(name)
        (folder / _REQUEST).write_bytes(msgspec.json.encode(request))
        _run_ranks(folder, num_ranks)
        found = [_read(folder, number, one, num_ranks) for number, one in enumerate(sampled)]
    return Computed(found, getattr(torch, transformer["params_dtype"].text.removeprefix("torch.")), num_ranks)


def _run_ranks(folder: Path, num_ranks: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    ended = subprocess.run(
        [sys.executable, *launcher, "-m", "megatron_rl.drift.trainer", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        error = folder / _ERROR
        reason = error.read_text() if error.exists() else ended.stderr[-2000:]
        raise InputError(f"the trainer's model could not be computed: {reason.strip()}")


def _read(folder: Path, number: int, sampled: Recorded, num_ranks: int) -> Recorded:
    recording = join_ranks([Recording.load(_name_recording(folder, number, rank)) for rank in range(num_ranks)])
    log_probs = recording[LayerPart(ModelPart.LOG_PROBS)]["out"].tolist()
    return dataclasses.replace(sampled, log_probs=log_probs, recording=recording)


def _name_recording(folder: Path, number: int, rank: int) -> Path:
    return folder / f"response-{number}-rank-{rank}.safetensors"


# In a rank.


def main(argv: Sequence[str]) -> int:
    """Record the responses of a request on this rank."""
    folder = Path(argv[0])
    request = msgspec.json.decode((folder / _REQUEST).read_bytes(), type=_Request)
    try:
        _record(request, folder)
    except MegatronRLError as error:
        (folder / _ERROR).write_text("; ".join(error.problems))
        return error.exit_code
    return ExitCode.OK


def _record(request: _Request, folder: Path) -> None:
    # Read as on the ranks of the run, whose number is another.
    settings, _ = parse_sizes(request.words, request.world_size)
    settings = _undivide(settings)
    platforms.select(settings.platform).install()
    # These import Megatron, and the platform is installed.
    from megatron_rl.drift.trained_model import TrainedModelWatch
    from megatron_rl.trainer.data.device_copier import DeviceCopier
    from megatron_rl.trainer.data.packing import pack_groups
    from megatron_rl.trainer.loop.settling import settle_backends
    from megatron_rl.trainer.mcore.session import start_session
    from megatron_rl.trainer.mcore.step.forward_step import compute_log_probs
    from megatron_rl.trainer.mcore.step.policy import build_reference

    with start_session(settings) as session:
        if session.device.type != "cpu":
            settings = settle_backends(settings, session, lambda line: print(line, file=sys.stderr))
        model = build_reference(settings, session, Path(request.checkpoint))
        watch, copier = TrainedModelWatch(model.models[0]), DeviceCopier(session.platform)
        for number, one in enumerate(request.responses):
            prompt, response = one.tokens[: -one.num_sampled], one.tokens[-one.num_sampled :]
            pack = pack_groups([(prompt, [response])])
            pack, pending = copier.copy(pack, pack.layout)
            pending.wait()
            compute_log_probs(model.chunks, [pack], one.temperature)
            watch.take(len(one.tokens)).save(_name_recording(folder, number, session.rank))


def _undivide(settings: Settings) -> Settings:
    """Return the settings of a model that tensor-parallel ranks alone divide."""
    config: Any = copy.copy(settings.transformer)
    config.pipeline_model_parallel_size = config.context_parallel_size = config.expert_model_parallel_size = 1
    config.virtual_pipeline_model_parallel_size = None
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    config.pipeline_model_parallel_layout = None
    config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = False
    config.sequence_parallel = False
    loop = dataclasses.replace(settings.loop, frozen_offload=False)
    return dataclasses.replace(settings, transformer=config, loop=loop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
