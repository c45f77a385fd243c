"""Sends metrics to TensorBoard and Weights & Biases. Each package is imported only if its flag is given."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.settings import ObserveConfig
from megatron_rl.errors import MegatronRLError, PlatformError
from megatron_rl.observe.metrics import flat


class Sink(Protocol):
    """A receiver of an iteration's numbers under flat names, "group/name"."""

    def write(self, version: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in a folder. A resumed run's files hide the earlier ones' values from `version` on."""

    def __init__(self, folder: Path, version: int) -> None:
        module = _imported("torch.utils.tensorboard", "tensorboard", "--tensorboard-dir")
        self._writer = module.SummaryWriter(log_dir=str(folder), purge_step=version)

    def write(self, version: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, version)
        # Otherwise a kill would lose the last two minutes.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run in Weights & Biases, resumed by its id; WANDB_MODE=offline keeps it in the local folder."""

    def __init__(self, config: ObserveConfig, run: str) -> None:
        wandb = _imported("wandb", "wandb", "--wandb-project")
        if config.wandb_save_dir:
            # If the folder does not exist, wandb writes to a temporary one instead.
            Path(config.wandb_save_dir).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity or None,
            name=config.wandb_exp_name or run,
            dir=config.wandb_save_dir or None,
            # An id may not have these characters.
            id=re.sub(r"[/\\#?%:\s]", "-", run),
            resume="allow",
        )
        # Plotted over the version: wandb's own count of steps cannot go back to where a resumed run continues.
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "version": version})

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """All sinks. If one fails, this is reported and the sink is left out from then on.

    The metrics file has the same numbers, and a run of days must not end because a dashboard cannot be reached.
    """

    def __init__(self, sinks: Sequence[Sink], say: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._say = say

    def write(self, version: int, values: Mapping[str, Any]) -> None:
        """Flatten an iteration's metrics and pass them to each sink."""
        numbers = flat(values)
        self._each(lambda sink: sink.write(version, numbers))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self._say(f"{type(sink).__name__} fails and is left out from now on: {type(error).__name__}: {error}")


def sinks_of(config: ObserveConfig, run: str, version: int, say: Callable[[str], None]) -> Sinks:
    """Make the sinks of the flags, for a run that starts at `version`."""
    sinks: list[Sink] = []
    folder = config.tensorboard_dir
    if folder is not None:
        _add(sinks, f"--tensorboard-dir {folder}", lambda: TensorBoardSink(folder, version), say)
    if config.wandb_project:
        _add(sinks, f"--wandb-project {config.wandb_project}", lambda: WandbSink(config, run), say)
    elif config.wandb_exp_name or config.wandb_entity or config.wandb_save_dir:
        say("without --wandb-project, --wandb-exp-name, --wandb-entity and --wandb-save-dir have no effect")
    return Sinks(sinks, say)


def _add(sinks: list[Sink], flag: str, make: Callable[[], Sink], say: Callable[[str], None]) -> None:
    """Add a sink; if it cannot be made it is left out, but a missing package is an error of the flag."""
    try:
        sinks.append(make())
    except MegatronRLError:
        raise
    except Exception as error:
        say(f"{flag} fails and is left out: {type(error).__name__}: {error}")


def _imported(module: str, package: str, flag: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlatformError(
            f"{flag} needs the package {package}, which does not load ({error}): pip install {package}, or drop {flag}"
        ) from error
