"""Finds out, before anything heavy starts, that the checkpoint to resume from leaves a run nothing to do.

A run has nothing left to do if the checkpoint holds --train-iters iterations, and none of these would be made:
- the Hugging Face folder of its last iteration;
- the evaluation after its last iteration.
"""

from megatron_rl.arguments.run import RunSettings
from megatron_rl.mcore.checkpoint import folders, serialization
from megatron_rl.mcore.checkpoint.checkpointer import EXTRA
from megatron_rl.observe import metrics
from megatron_rl.records.append_file import read_lines
from megatron_rl.training.saver import find_missing_hf


def describe_finished(settings: RunSettings) -> str | None:
    """Return what to tell the user if nothing is left to do; None if the run must start."""
    config, num_iterations = settings.checkpoint, settings.training.train_iters
    assert num_iterations is not None
    if config.load is None or config.finetune:
        return None
    if config.ckpt_step is None and not folders.holds_checkpoint(config.load):
        return None
    version, source = folders.find(config.load, config.ckpt_step)
    # Loading refuses the checkpoint of another run, and says why.
    is_own = serialization.read_common(source).get(EXTRA, {}).get("run") == settings.name
    if version < num_iterations or not is_own:
        return None
    if find_missing_hf(settings, version) is not None or _lacks_evaluation(settings, version):
        return None
    return (
        f"{source} already holds iteration {version} of --train-iters {num_iterations}: nothing is left to do, and "
        "nothing was started. Write a larger --train-iters to train on"
    )


def _lacks_evaluation(settings: RunSettings, version: int) -> bool:
    if settings.evaluation.interval is None:
        return False
    path = settings.folder / metrics.FILE_NAME
    records = read_lines(path) if path.exists() else []
    return not any(record["version"] == version and "evaluation" in record for record in records)
