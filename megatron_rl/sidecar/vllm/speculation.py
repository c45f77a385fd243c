"""Speculative decoding (--rollout-speculative): the flag of vLLM's that it becomes, and its mistakes.

Drafts are tokens that the policy may accept. By vLLM's standard rule, a token x that was drafted from a distribution q
is accepted with probability min(1, p(x) / q(x)), and otherwise one is drawn from max(0, p - q). So samples have the
policy's distribution p whatever is drafted. Drafts decide the speed alone, and a publish need not prove them.

A model that drafts comes from its own folder, or is the checkpoint's prediction layers. A publish writes neither. Only
parameters that it shares with the policy follow it (`patches.describe_draft_model`).
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.shared.device_memory import FLAG_OF_SHARING
from megatron_rl.sidecar.vllm import flags as vllm_flags

FLAG, VLLM_FLAG = "--rollout-speculative", vllm_flags.FLAGS_OF_DRAFTS[0]
PACKAGE = "arctic-inference==0.1.1"
"""The package that drafts by suffixes, in the release that vLLM names."""
_MODULE, _MISSING = "arctic_inference", 3
_LOOK_FOR_MODULE = f"import importlib.util, sys; sys.exit({_MISSING} * (importlib.util.find_spec({_MODULE!r}) is None))"
# The keys of config.json that count the layers which predict a further token.
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# The end of the name of a class that drafts from the policy's hidden states.
_EAGLE = "Eagle3"


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to draft tokens."""

    name: str
    """vLLM's name."""
    has_folder: bool = False
    """True if it is written with the folder of a model: NAME:DIR."""
    num_tokens: int = 4
    """The tokens of a draft, or the most of them, if no flag says it."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further settings of vLLM's."""


METHODS = {
    # The longest and the shortest run of last tokens that is looked up in the text before.
    "ngram": Method("ngram", settings={"prompt_lookup_max": 4, "prompt_lookup_min": 1}),
    "suffix": Method("suffix", num_tokens=24),
    "draft": Method("draft_model", has_folder=True),
    "eagle3": Method("eagle3", has_folder=True),
    # A checkpoint's prediction layer is trained for one token.
    "mtp": Method("mtp", num_tokens=1),
}


def describe_for_vllm(rollout: RolloutConfig) -> str | None:
    """Return the value of vLLM's flag; None for no drafts."""
    if rollout.speculative is None:
        return None
    kind, _, folder = rollout.speculative.partition(":")
    method = METHODS[kind]
    return json.dumps(
        {
            "method": method.name,
            "num_speculative_tokens": rollout.speculative_tokens or method.num_tokens,
            "rejection_sample_method": "standard",
            **method.settings,
            **({"model": str(Path(folder).resolve())} if method.has_folder else {}),
        }
    )


def find_draft_problems(rollout: RolloutConfig, model: Path | None = None) -> Iterator[str]:
    """Yield each mistake in which drafts are asked for, of a policy that starts from the folder `model`."""
    text, own = rollout.speculative, vllm_flags.find_flag(rollout.vllm_args, *vllm_flags.FLAGS_OF_DRAFTS)
    untried = "drafts have not been tried with adapters in engines"
    if text is None:
        if own and rollout.lora_rank > 0:
            yield (
                f"{vllm_flags.FLAG} with {own} and --rollout-lora-rank cannot be given together, because {untried}: "
                "drop one of them"
            )
        if rollout.speculative_tokens is not None:
            yield f"{FLAG}-tokens {rollout.speculative_tokens} needs {FLAG}: write {FLAG} ngram, or drop it"
        return
    kind, colon, folder = text.partition(":")
    method = METHODS.get(kind)
    if method is None or method.has_folder != bool(folder) or (colon and not folder):
        known = ", ".join(name + (":DIR" if method.has_folder else "") for name, method in METHODS.items())
        yield f"{FLAG} {text} must be one of {known}"
        return
    for flag, is_given, reason in (
        ("--rollout-replay-routing", rollout.replay_routing, "which experts drafted tokens went to is not known"),
        ("--rollout-lora-rank", rollout.lora_rank > 0, untried),
        (FLAG_OF_SHARING, rollout.is_colocated, "the memory that drafts take is not counted"),
        (f"{vllm_flags.FLAG} with {own}", own is not None, "both say how tokens are drafted"),
    ):
        if is_given:
            yield f"{FLAG} and {flag} cannot be given together, because {reason}: drop one of them"
    # Those of other hosts have environments of their own, where vLLM refuses the start by the same name.
    if kind == "suffix" and rollout.num_engines > 0 and not _has_module(rollout.python):
        python = rollout.python or sys.executable
        yield f"{FLAG} suffix needs a package in the engines' environment: {python} -m pip install {PACKAGE}"
    policy = None if model is None else _read(model / "config.json")
    if kind == "mtp" and policy is not None and not any(_find(policy, key) for key in _PREDICTION_LAYERS):
        yield (
            f"{FLAG} mtp: {model} has no prediction layers ({' or '.join(_PREDICTION_LAYERS)} in config.json): take "
            "a model that has some, or draft in another way"
        )
    if method.has_folder:
        yield from _find_problems_of_model(text, Path(folder), policy)
        if policy is not None and model is not None and _have_other_tokens(model, Path(folder)):
            yield f"{FLAG} {text}: its tokenizer.json gives tokens other numbers than {model}: take a draft of its kind"


def _has_module(python: Path | None) -> bool:
    """Check whether the engines' interpreter, or this one, finds the module; true for one that cannot be asked."""
    if python is None:
        return importlib.util.find_spec(_MODULE) is not None
    # Engines of another interpreter do not inherit it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run([python, "-c", _LOOK_FOR_MODULE], env=environment, cwd="/", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != _MISSING


def _find_problems_of_model(text: str, folder: Path, policy: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield each mistake of a folder with a model that drafts."""
    config = _read(folder / "config.json")
    if config is None or not any(any(folder.glob(ending)) for ending in ("*.safetensors", "*.bin")):
        yield f"{FLAG} {text}: {folder} must be a Hugging Face folder, with config.json and *.safetensors"
        return
    # Many heads name the architecture of a whole model.
    is_head = "draft_vocab_size" in config or any(_EAGLE in str(one) for one in config.get("architectures") or ())
    if is_head and text.startswith("draft:"):
        yield f"{FLAG} {text}: its config.json is a head's: write eagle3:{folder}, or another folder"
    sizes = [None if one is None else _find(one, "vocab_size") for one in (policy, config)]
    if None not in sizes and sizes[0] != sizes[1]:
        yield (
            f"{FLAG} {text}: it has {sizes[1]} tokens (vocab_size), and the policy has {sizes[0]}: take a draft with "
            "the policy's tokenizer"
        )


def _read(path: Path) -> dict[str, Any] | None:
    """Read a file of JSON; None if it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _find(config: Mapping[str, Any], key: str) -> Any:
    """Find a value of a config.json, which a model with images keeps under its text model."""
    inner = config.get("text_config")
    return config.get(key) or (inner.get(key) if isinstance(inner, dict) else None)


def _have_other_tokens(model: Path, folder: Path) -> bool:
    """Check whether both folders have a tokenizer, and these differ in the numbers of tokens."""
    found = [_read(one / "tokenizer.json") for one in (model, folder)]
    tokens = [one["model"].get("vocab") for one in found if one is not None and isinstance(one.get("model"), dict)]
    return len(tokens) == 2 and tokens[0] != tokens[1]
