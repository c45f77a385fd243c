"""When a run is saved, and what beside model and optimizer: all that makes a resumed run the one that never stopped."""

from megatron_rl.config import Settings
from megatron_rl.data.prompts import PromptSource
from megatron_rl.mcore.policy import Policy
from megatron_rl.mcore.session import Session


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        policy: Policy,
        run: str,
        prompts: PromptSource | None,
        reference: str | None,
    ):
        self._settings = settings
        self._session = session
        self._policy = policy
        self._run = run
        self._prompts = prompts
        self._reference = reference

    def load(self) -> int:
        return 0

    def save_if_due(self, version: int, is_last: bool) -> None:
        config = self._settings.checkpoint
        if not (is_last or (config.save_interval and version % config.save_interval == 0)):
            return
        self._policy.synchronize()
        if config.save_hf is not None:
            folder = config.save_hf / f"iter_{version:07d}"
            self._policy.weights.save_hf(folder, self._settings.model.hf_model, self._settings.publish.dtype)

    def finish(self) -> None:
        pass
