"""When a run is saved, and what beside model and optimizer: all that makes a resumed run the one that never stopped."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import Settings
from megatron_rl.data.prompts import PromptSource
from megatron_rl.errors import InputError
from megatron_rl.mcore.checkpoint_folders import iteration_folder
from megatron_rl.mcore.checkpointer import Checkpointer
from megatron_rl.mcore.policy import Policy
from megatron_rl.mcore.reference import Reference
from megatron_rl.mcore.session import Session


class Checkpoints:
    """The checkpoints of one run, in Megatron's format and, if asked for, in Hugging Face's."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        policy: Policy,
        run: str,
        prompts: PromptSource | None,
        reference: Reference | None,
    ):
        """`prompts` is rank 0's."""
        self._settings = settings
        self._session = session
        self._policy = policy
        self._run = run
        self._prompts = prompts
        self._start = None if reference is None else reference.start
        self._checkpointer = Checkpointer(settings, session, policy.state, reference)
        self.last_saved: Path | None = None
        self.last_hf: Path | None = None

    def load(self, say: Callable[[str], None]) -> int:
        """The version that the run goes on from: that of --load, or 0."""
        loaded = self._checkpointer.load()
        if loaded is None:
            return 0
        say(f"going on from {loaded.source}, version {loaded.version}")
        for note in loaded.notes:
            say(note)
        if loaded.extra:
            self._session.agree(lambda: self._take_over(loaded.extra, loaded.source))
        return loaded.version

    def save_if_due(self, version: int, is_last: bool, audit_head: str) -> None:
        """Both forms, and make an earlier one that was written meanwhile the newest."""
        self._checkpointer.poll()
        if self._checkpointer.save_if_due(version, self._extra(audit_head), is_last):
            assert self._settings.checkpoint.save is not None
            self.last_saved = iteration_folder(self._settings.checkpoint.save, version)
        self._save_hf(version, is_last)

    def finish(self) -> None:
        """Return when everything is written."""
        self._checkpointer.finish()

    def _save_hf(self, version: int, is_last: bool) -> None:
        config = self._settings.checkpoint
        interval = config.save_interval
        if config.save_hf is None or not (is_last or (interval is not None and version % interval == 0)):
            return
        folder = iteration_folder(config.save_hf, version)
        if self._session.rank == 0:
            # Left by this run before it was killed and went on from an earlier version.
            shutil.rmtree(folder, ignore_errors=True)
        self._policy.synchronize()
        self._policy.weights.save_hf(folder, self._settings.model.hf_model, self._settings.publish.dtype)
        self.last_hf = folder

    def _extra(self, audit_head: str) -> dict[str, Any]:
        return {
            "run": self._run,
            "prompts": self._prompts.state() if self._prompts is not None else {},
            "reference": self._start,
            "audit_head": audit_head,
        }

    def _take_over(self, extra: Mapping[str, Any], source: Path) -> None:
        if extra.get("run") != self._run:
            raise InputError(
                f"{source} is of the run {extra.get('run')!r}, and --rollout-folder names {self._run!r}: seeds of "
                f"responses follow from the name; write a folder of that name, or --finetune to begin a new run"
            )
        if extra.get("reference") not in (None, self._start) and self._start is not None:
            raise InputError(
                f"{source} was trained against the reference {extra['reference'][:12]}, and --grpo-ref-model (or "
                f"--hf-model) is {self._start[:12]}: write the folder that was meant, or --finetune"
            )
        if self._prompts is not None:
            self._prompts.restore(extra.get("prompts"))
