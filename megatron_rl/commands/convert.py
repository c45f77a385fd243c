"""`megatron-rl convert`: weights between Hugging Face's format and Megatron's, under Megatron's flags.

To Megatron's distributed format:

    megatron-rl convert --hf-model DIR --save DIR

To Hugging Face's format, where FLAGS or the folder of --hf-model describe the model:

    megatron-rl convert --load DIR FLAGS --save-hf DIR
    megatron-rl convert --load DIR --hf-model DIR --save-hf DIR

A checkpoint of adapters becomes a folder of merged weights, with the base and the flags of the run:

    megatron-rl convert --load DIR --hf-model BASE --lora-rank N --save-hf DIR

One process suffices. Under torchrun the ranks share the work, and the flags say how they divide it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.command_line import parse as command_line
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, InputError, UsageError


def main(argv: Sequence[str]) -> int:
    """Convert the folder that the flags name, and print its fingerprint."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return ExitCode.OK if argv else ExitCode.USAGE
    os.environ.setdefault("WORLD_SIZE", "1")
    settings = command_line.parse(argv)
    checkpoint = settings.checkpoint
    if checkpoint.save is None and checkpoint.save_hf is None:
        raise UsageError("nothing to write: name a folder with --save (Megatron's format) or --save-hf")
    if checkpoint.load is None and settings.model.hf_model is None:
        raise UsageError("nothing to read: name a folder with --hf-model or --load")
    # Reported before hours of reading, and before --save is written.
    if checkpoint.save_hf is not None and checkpoint.save_hf.exists():
        raise InputError(f"--save-hf {checkpoint.save_hf} exists already: name another folder, or remove it")
    fingerprint = _convert(settings)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"fingerprint {fingerprint}", file=sys.stdout)
    return ExitCode.OK


def _convert(settings: Settings) -> str:
    # Imported after the platform is installed, which `parse` has done.
    from megatron_rl.trainer.mcore.checkpoint.serialization import load_model, save_model
    from megatron_rl.trainer.mcore.model.gpt import build_model
    from megatron_rl.trainer.mcore.model.weights import ModelWeights
    from megatron_rl.trainer.mcore.session import start_session
    from megatron_rl.trainer.mcore.step.policy import build_base

    checkpoint, hf_model = settings.checkpoint, settings.model.hf_model
    with start_session(settings) as session:
        chunks = build_model(settings)
        weights = ModelWeights(chunks, session)
        iteration, base = 0, None
        if settings.lora.rank and hf_model is not None:
            weights.load_hf(hf_model)
            base = build_base(settings, session, chunks, weights)
        if base is not None:
            weights = weights.merged_with(base.adapters)
            if checkpoint.load is not None:
                base.check(*_read_common(checkpoint.load, checkpoint.ckpt_step))
        if checkpoint.load is not None:
            iteration = load_model(chunks, checkpoint.load, session, checkpoint.ckpt_step)
            weights.zero_padding()
        elif hf_model is not None and base is None:
            weights.load_hf(hf_model)
        if checkpoint.save is not None:
            save_model(chunks, checkpoint.save, iteration, session)
        if checkpoint.save_hf is not None:
            # The tokens that end a response besides those of the model's files; the checkpoint's run found them.
            ends = [] if checkpoint.load is None else _read_stops(checkpoint.load, checkpoint.ckpt_step)
            return weights.save_hf(checkpoint.save_hf, source=hf_model, dtype=settings.publish.dtype, ends=ends)
        return weights.fingerprint()


def _read_stops(load: Path, step: int | None) -> list[int]:
    """Return the tokens with which the checkpoint's run ended responses; none if no run of ours wrote it."""
    from megatron_rl.trainer.loop.saver import read_kept_state
    from megatron_rl.trainer.mcore.checkpoint.checkpointer import EXTRA

    common, source = _read_common(load, step)
    kept = common.get(EXTRA)
    if kept is None:
        return []
    return list(read_kept_state(kept, source, "convert it with that version").stops)


def _read_common(load: Path, step: int | None) -> tuple[dict[str, Any], Path]:
    """Return everything in the checkpoint but its tensors, and the checkpoint's folder."""
    from megatron_rl.trainer.mcore.checkpoint import folders, serialization

    _, source = folders.find(load, step)
    return serialization.read_common(source), source
