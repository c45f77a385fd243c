"""Mends vLLM on CPUs: a request with a seed whose prefill is split ends the engine.

After a step of a prefill that is not its last, vLLM takes back the random number that it drew for the request, by the
offset of its generator. A CPU's generator has none ("CPU Generator does not use offset"). The patch keeps the state of
such generators over the step instead: the discarded draw does not advance them, which is what was meant.
"""

import inspect
from typing import Any

from megatron_rl.errors import PlatformError

_SEED_MARK = "megatron_rl_seed_patch"
# What vLLM 0.32 has. Another vLLM may have mended it, or have moved what is patched.
_SAMPLE = ("self", "logits", "spec_decode_metadata")
_BOOKKEEP = ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens")


def patch_seeded_partial_prefill() -> str:
    """Patch it where needed; says what was done."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "not needed: not a CPU"
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return patch_runner(GPUModelRunner)


def patch_runner(runner: Any) -> str:
    """Patch vLLM's runner of models; says what was done."""
    if getattr(runner, _SEED_MARK, False):
        return "applied before"
    bookkeep, sample = runner._bookkeeping_sync, runner._sample
    if "set_offset" not in inspect.getsource(bookkeep):
        return "not needed: vLLM takes no offset back"
    for function, parameters in ((sample, _SAMPLE), (bookkeep, _BOOKKEEP)):
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            raise PlatformError(
                f"vLLM's {function.__name__} takes {found}, and the patch for seeded requests on CPUs knows "
                f"{parameters}: use vLLM 0.32, or see whether this version still needs {__name__}"
            )
    runner._sample, runner._bookkeeping_sync = _keeping_discarded(sample), _without_generators(bookkeep)
    setattr(runner, _SEED_MARK, True)
    return "applied"


def _keeping_discarded(sample: Any) -> Any:
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        generators = [generator for i in discarded if (generator := batch.generators.get(int(i))) is not None]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    return _sample


def _without_generators(bookkeep: Any) -> Any:
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            batch.generators = generators

    return _bookkeeping_sync
