"""A hook that patches modules of megatron, and the patches that every platform needs.

The hook applies a module's patches when megatron itself imports the module. So no module is imported only to be
patched, and no patch can come too late. Most patches repair megatron-core if neither TransformerEngine nor apex is
installed. Each patch checks the code that it changes, and raises on a megatron-core that it does not know.
"""

import builtins
import contextlib
import dataclasses
import importlib.machinery
import inspect
import logging
import os
import pickle
import queue
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron_rl import versions
from megatron_rl.errors import PlatformError
from megatron_rl.ops.main_gradients import add_weight_gradient


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change to one module of megatron. The docstring of `apply` is its reason."""

    name: str
    module: str
    apply: Callable[[ModuleType], None]

    @property
    def reason(self) -> str:
        return inspect.cleandoc(self.apply.__doc__ or "")


def install_patches(patches: Iterable[Patch]) -> None:
    """Have the hook apply the patches to each module right after the module has run."""
    hook = _hook()
    for patch in patches:
        hook.patches.setdefault(patch.module, []).append(patch)


def replace_import(function: Callable[..., ModuleType]) -> None:
    """Replace `__import__` in megatron's modules, and nowhere else."""
    _hook().import_function = function


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let an attribute have another value within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def expect_parameters(owner: Any, name: str, *expected: str) -> Callable[..., Any]:
    """Return the function `owner.name`; raise unless it has the parameters that a patch was written for."""
    function = getattr(owner, name, None)
    found = tuple(inspect.signature(function).parameters) if function is not None else None
    if function is None or found != expected:
        state = "does not exist" if found is None else f"takes ({', '.join(found)})"
        raise unknown_megatron(f"{owner.__name__}.{name} {state}, expected ({', '.join(expected)})")
    return function


def expect_one_of(owner: Any, **forms: tuple[str, ...]) -> str:
    """Return the name that this version of megatron-core has for a function, of several names in `forms`.

    Each name is given with the parameters that a patch was written for. Exactly one must exist, with its parameters.
    """
    names = [name for name in forms if hasattr(owner, name)]
    if len(names) != 1:
        found = f"has {' and '.join(names)}" if names else "has neither"
        raise unknown_megatron(f"{owner.__name__} {found}, expected one of {', '.join(forms)}")
    expect_parameters(owner, names[0], *forms[names[0]])
    return names[0]


def unknown_megatron(what: str) -> PlatformError:
    """Make the error for a megatron-core that a patch was not written for."""
    return PlatformError(
        f"megatron-core {versions.describe_megatron()}: {what}; a patch of megatron_rl was written for another "
        f"version: install megatron-core {versions.MEGATRON_CORE.wanted}"
    )


class _Finder:
    """The hook: it gives our loader to megatron's source modules, which other finders find."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        self.import_function: Callable[..., ModuleType] | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron."):
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                break
        else:
            return None
        if type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
        elif name in self.patches:
            raise unknown_megatron(f"{name} is loaded by {type(spec.loader).__name__}, not from a source file")
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader that runs a module of megatron with our `__import__`, then patches it."""

    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        if self._finder.import_function is not None:
            # For an import statement, Python looks up `__import__` in the builtins of the module's globals.
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._finder.import_function}
        super().exec_module(module)
        for patch in self._finder.patches.get(self.name, ()):
            patch.apply(module)


def _hook() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    hook = _Finder()
    sys.meta_path.insert(0, hook)
    return hook


_OPTIMIZER_MODULE = "megatron.core.optimizer.distrib_optimizer"


def bind_te_general_gemm(module: ModuleType) -> None:
    """Bind te_general_gemm: the MoE router compares it with None, and 0.16 binds it with TransformerEngine only."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def keep_step_on_load(module: ModuleType) -> None:
    """Keep the tensor `step` of torch's Adam on load: the checkpoint's parameter states lack it, which raises KeyError.

    The step itself was restored from the parameter groups just before, so the present tensor is right.
    """
    optimizer = _unfused_optimizer(module)
    if optimizer is None:
        return
    original = expect_parameters(optimizer, "_set_main_param_and_optimizer_states", "self", "model_param", "tensors")

    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if "step" not in tensors:
            group_index, group_order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group_index]["params"][group_order]
            state = self.optimizer.state.get(main_param, {})
            if "step" in state:
                tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    optimizer._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


def allocate_state_before_saving(module: ModuleType) -> None:
    """Allocate Adam's state before saving: state_dict asserts one step in the states, and a new optimizer has none."""
    optimizer = _unfused_optimizer(module)
    if optimizer is None:
        return
    original = expect_parameters(
        optimizer,
        "sharded_state_dict",
        "self",
        "model_sharded_state_dict",
        "is_loading",
        "sharding_type",
        "metadata",
    )

    def sharded_state_dict(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not self.is_stub_optimizer and isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            allocate_adam_state(self.optimizer)
        return original(self, *arguments, **keywords)

    optimizer.sharded_state_dict = sharded_state_dict


def allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give Adam the state that it has before its first step, if it has no state yet."""
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def separate_steps_after_load(module: ModuleType) -> None:
    """Give each state its own step after load_state_dict, which shares one: Adam advances it once for each parameter.

    Otherwise the steps are silently wrong, and with them Adam's bias correction.
    """
    optimizer = _unfused_optimizer(module)
    if optimizer is None:
        return
    original = expect_parameters(optimizer, "load_state_dict", "self", "state_dict")

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if self.is_stub_optimizer:
            return
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    optimizer.load_state_dict = load_state_dict


def recompute_without_engine(module: ModuleType) -> None:
    """Keep CheckpointWithoutOutput, which recomputes norms, from reading fp8's state: only TransformerEngine has one.

    Its default argument asks for that state.
    """
    checkpoint: Any = getattr(module, "CheckpointWithoutOutput", None)
    if checkpoint is None or not hasattr(module, "HAVE_TE"):
        raise unknown_megatron(f"{module.__name__} has no HAVE_TE or no CheckpointWithoutOutput")
    original = expect_parameters(checkpoint, "__init__", "self", "fp8")
    if module.HAVE_TE:
        return

    def init(self: Any, fp8: object = None) -> None:
        original(self, fp8)
        self.fp8 = False

    checkpoint.__init__ = init


def tell_latent_attention_of_engine(module: ModuleType) -> None:
    """Tell multi-latent attention if TransformerEngine is missing: 0.16 would ask for instances of its layers."""
    if not hasattr(module, "HAVE_TE") or not hasattr(module, "TELinear"):
        raise unknown_megatron(f"{module.__name__} has no HAVE_TE or no TELinear")
    # Without TransformerEngine, 0.16 has a stand-in of unittest here, and later versions have None.
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # type: ignore[attr-defined]


def add_weight_gradients_with_torch(module: ModuleType) -> None:
    """Add weight gradients to main gradients with torch, where megatron wants apex for it and apex is not installed."""
    if not hasattr(module, "_grad_accum_fusion_available"):
        raise unknown_megatron(f"{module.__name__} has no _grad_accum_fusion_available")
    if not module._grad_accum_fusion_available:
        module.fused_weight_gradient_mlp_cuda = SimpleNamespace(  # type: ignore[attr-defined]
            wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
        )
        module._grad_accum_fusion_available = True  # type: ignore[attr-defined]


class SharedResults:
    """Results that a fork hands to its parent, in memory that both share and that ends with both."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("checkpoint-results"), "w+b", buffering=0)

    def put(self, results: Any) -> None:
        """Store the results, once."""
        self._file.write(pickle.dumps(results))

    def get_nowait(self) -> Any:
        """Take the results; the half-written results of a killed fork do not count."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        try:
            return pickle.loads(data)
        except Exception:  # pickle raises whatever the bytes make it do
            raise queue.Empty from None
        finally:
            self._file.close()


def share_write_results(module: ModuleType) -> None:
    """Pass the results of writing a checkpoint through shared memory, not through a process that is spawned for them.

    That process takes seconds to start, runs the entry script again, and survives a rank that is killed. Here forks
    write checkpoints, and memory can be shared with a fork.
    """
    # 0.16 has the name with the underscore.
    name = expect_one_of(module, get_write_results_queue=("mp_mode",), _get_write_results_queue=())
    setattr(module, name, lambda mp_mode="spawn": SharedResults())


# Beginnings of warnings that modules of megatron log in every run.
_NOTICES = (
    "DistributedDataParallel: full_param_layout not provided",
    "GPTModel IS DEPRECATED",
    "MCore's async save is deprecated",
)


def silence_notices(module: ModuleType) -> None:
    """Drop notices of future changes to megatron-core: this package follows such changes, not its users."""
    logging.getLogger(module.__name__).addFilter(lambda record: not record.getMessage().startswith(_NOTICES))


def _unfused_optimizer(module: ModuleType) -> Any:
    """Return DistributedOptimizer if it runs torch's own Adam; None if TransformerEngine or apex is installed."""
    if not hasattr(module, "HAVE_APEX_OR_TE") or not hasattr(module, "DistributedOptimizer"):
        raise unknown_megatron(f"{module.__name__} has no HAVE_APEX_OR_TE or no DistributedOptimizer")
    return None if module.HAVE_APEX_OR_TE else module.DistributedOptimizer


FIXES = (
    Patch("fused_weight_gradient_mlp_cuda", "megatron.core.tensor_parallel.layers", add_weight_gradients_with_torch),
    Patch("te_general_gemm", "megatron.core.transformer.moe.moe_utils", bind_te_general_gemm),
    Patch("HAVE_TE", "megatron.core.transformer.multi_latent_attention", tell_latent_attention_of_engine),
    Patch("CheckpointWithoutOutput", "megatron.core.tensor_parallel.random", recompute_without_engine),
    Patch("DistributedOptimizer._set_main_param_and_optimizer_states", _OPTIMIZER_MODULE, keep_step_on_load),
    Patch("DistributedOptimizer.sharded_state_dict", _OPTIMIZER_MODULE, allocate_state_before_saving),
    Patch("DistributedOptimizer.load_state_dict", _OPTIMIZER_MODULE, separate_steps_after_load),
    Patch(
        "get_write_results_queue",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        share_write_results,
    ),
    Patch("notice about buffers", "megatron.core.distributed.distributed_data_parallel", silence_notices),
    Patch("notice about GPTModel", "megatron.core.models.gpt.gpt_model", silence_notices),
    Patch("notice about saving", "megatron.core.dist_checkpointing.strategies.torch", silence_notices),
)
