"""Our extension of vLLM's workers: the remote calls that prepare a worker, and load and prove its weights.

vLLM mixes this class into its worker. Its methods are called with strings, and answer plain data. A refusal is the
answer `{"error": ..., "code": ...}` and not an exception, because vLLM would report an exception only as "worker
failed". What the calls do to weights is in `held_model.py`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.errors import MegatronRLError
from megatron_rl.ops.triton_support import without_compile_hook
from megatron_rl.sidecar.engines import RefusalCode
from megatron_rl.sidecar.vllm.derived import describe_quantization
from megatron_rl.sidecar.vllm.held import NotHeld
from megatron_rl.sidecar.vllm.held_model import HeldModel
from megatron_rl.sidecar.vllm.parts import pick_place
from megatron_rl.sidecar.vllm.received import NotWritten, must_be_reached
from megatron_rl.sidecar.vllm.sleeping import Part

RpcAnswer = dict[str, Any]

_CODES: tuple[tuple[type[MegatronRLError], RefusalCode], ...] = (
    (NotHeld, RefusalCode.WRONG_WEIGHTS),
    (NotWritten, RefusalCode.NOT_WRITTEN),
    (MegatronRLError, RefusalCode.REFUSED),
)
"""The codes of refusals; the first class that matches counts."""


def answered(method: Callable[..., RpcAnswer]) -> Callable[..., RpcAnswer]:
    """Turn a refusal into an answer; the kernels of the method may compile."""

    def call(self: Any, *args: str) -> RpcAnswer:
        try:
            with without_compile_hook():
                return method(self, *args)
        except MegatronRLError as refusal:
            code = next(code for kind, code in _CODES if isinstance(refusal, kind))
            return {"error": str(refusal), "code": str(code)}

    return call


class WorkerExtension:
    """Mixed into vLLM's worker, which owns `rank`, `vllm_config`, `model_runner` and `reload_weights`."""

    megatron_rl_model: type[HeldModel] = HeldModel

    rank: int
    vllm_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]

    @property
    def megatron_rl_held(self) -> HeldModel:
        if "megatron_rl_kept" not in self.__dict__:
            self.__dict__["megatron_rl_kept"] = self.megatron_rl_model(self)
        held: HeldModel = self.__dict__["megatron_rl_kept"]
        return held

    @answered
    def megatron_rl_prepare(self, scoring: str = "ours") -> RpcAnswer:
        """Prepare the worker; return the facts about it that the sidecar needs.

        `scoring` says whose kernel computes the log-probs of sampled tokens on GPUs, "ours" or "vllm".
        """
        import vllm
        from vllm.outputs import CompletionOutput
        from vllm.platforms import current_platform

        from megatron_rl.sidecar.vllm import patches
        from megatron_rl.sidecar.vllm.scoring import use_own_scoring

        config, model = self.vllm_config.model_config, self.model_runner.get_model()
        is_cpu = current_platform.is_cpu()
        has_new_runner, device = getattr(self, "use_v2_model_runner", False), next(model.parameters()).device
        return {
            "vllm": vllm.__version__,
            "pid": os.getpid(),
            "rank": self.rank,
            "world_size": self.vllm_config.parallel_config.world_size,
            "max_model_len": config.max_model_len,
            "max_num_seqs": self.vllm_config.scheduler_config.max_num_seqs,
            "vocab_size": config.get_vocab_size(),
            "dtype": str(config.dtype).removeprefix("torch."),
            "quantization": describe_quantization(self.vllm_config),
            "has_experts": patches.has_experts(model),
            "returns_experts": patches.returns_experts(self.vllm_config),
            "device": "cpu" if is_cpu else current_platform.device_type,
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "records_weights": "weight_versions" in CompletionOutput.__annotations__,
            "eos_token_ids": sorted(_eos_token_ids(config)),
            "has_drafts": self.vllm_config.speculative_config is not None,
            "draft_model": patches.describe_draft_model(self.model_runner),
            **patches.patch_on_cpu(model, self.vllm_config),
            "stacked_patch": patches.patch_stacked_experts(model, self.megatron_rl_held.tensor_rank),
            "wrong_rotations": patches.find_wrong_rotations(model) if is_cpu else [],
            "scoring_patch": use_own_scoring(scoring, has_new_runner, device, config.dtype),
            "listeners_closed": patches.close_listeners() if is_cpu else 0,
            "names_taken_off": patches.take_names_off() if is_cpu else 0,
        }

    @answered
    def megatron_rl_load(self, places: str, expected: str, base: str = "", number: str = "0") -> RpcAnswer:
        """Load the weights in its host's folder (`HeldModel.load`)."""
        folder, user = pick_place(places, self.vllm_config.parallel_config)
        return self.megatron_rl_held.load(folder, user, expected, base, int(number))

    @answered
    def megatron_rl_check_files(self, places: str, *names: str) -> RpcAnswer:
        """Refuse files of which these tensors, which the workers hold wrongly, do not match their digests."""
        folder, _ = pick_place(places, self.vllm_config.parallel_config)
        self.megatron_rl_held.check_files(folder, names)
        return {}

    @answered
    def megatron_rl_learn_order(self) -> RpcAnswer:
        """Learn the places of tensors in the parameters. The engine holds no real weights afterwards."""
        held = self.megatron_rl_held
        held.learn_order()
        return {"unknown": None if held.order is None else list(held.order.unknown), "obstacles": list(held.obstacles)}

    @answered
    def megatron_rl_reload_checkpoint(self, by: str = "") -> RpcAnswer:
        """Replace the weights by those that this engine started from; `by` is "vllm" if nothing is copied in place."""
        held = self.megatron_rl_held
        return {"reloaded": held.reload_checkpoint(is_by_vllm=bool(by)), "obstacles": list(held.obstacles)}

    @answered
    def megatron_rl_leave_loads_to_vllm(self, reason: str) -> RpcAnswer:
        """Copy no weights in place from now on."""
        self.megatron_rl_held.obstacles = (reason,)
        return {}

    @answered
    def megatron_rl_sleep(self) -> RpcAnswer:
        """Give the device to a rank."""
        self.megatron_rl_held.sleep()
        return {}

    @answered
    def megatron_rl_wake(self, part: Part) -> RpcAnswer:
        """Get the memory of weights or cache back."""
        self.megatron_rl_held.wake(part)
        return {}

    @answered
    def megatron_rl_reach(self, host: str, port: str) -> RpcAnswer:
        """Check that this worker can connect to the sender of a stream, which may be about to listen."""
        must_be_reached(host, int(port))
        return {}

    @answered
    def megatron_rl_begin_stream(self) -> RpcAnswer:
        """Digest all tensors that vLLM's own transfer engine passes to the model, before they are loaded."""
        self.megatron_rl_held.begin_stream()
        return {}

    @answered
    def megatron_rl_end_stream(self, expected: str) -> RpcAnswer:
        """Check that all of the announced weights arrived."""
        answer = self.megatron_rl_held.end_stream(expected)
        del answer["obstacles"]
        return answer

    @answered
    def megatron_rl_report(self) -> RpcAnswer:
        """Answer with the fingerprint of the weights that this worker holds."""
        return {"fingerprint": self.megatron_rl_held.fingerprint}


def _eos_token_ids(config: Any) -> set[int]:
    """Return the tokens that end a response, by the model's config.json and generation_config.json."""
    path = Path(config.model) / "generation_config.json"
    stored = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    found = set()
    for value in (stored, getattr(config.hf_text_config, "eos_token_id", None)):
        found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return found
