"""What a run's config.json says of its layout, which its metrics and its audit log do not."""

from collections.abc import Callable
from typing import Any

from megatron_rl.observe.config_file import RunConfig

_ABSENT = "-"
_ENGINES = {"vllm": "batching", "scripted": "scripted"}


def read_layout(config: RunConfig) -> dict[str, Any]:
    """Return fields of a `RunLayout`; what the configuration does not have is left out."""
    layout: dict[str, Any] = {"trainer_devices": config.num_devices, "engine_devices": config.num_engine_devices}
    for name, (section, value, read) in _PLACES.items():
        text = _find(config, section, value)
        layout[name] = None if text is None else read(text)
    has_reference = float(_find(config, "algorithm", "kl_beta") or 0) != 0
    has_old_policy = int(_find(config, "iteration", "updates") or 1) > 1
    layout["num_frozen"] = has_reference + has_old_policy
    layout["output_share"] = _find_output_share(config)
    return {name: value for name, value in layout.items() if value is not None}


_PLACES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "schedule": ("loop", "schedule", str),
    "num_stages": ("transformer", "pipeline_model_parallel_size", int),
    "num_virtual": ("transformer", "virtual_pipeline_model_parallel_size", int),
    "engine": ("rollout", "engine", _ENGINES.get),
    "max_running": ("rollout", "max_num_seqs", int),
    "max_in_flight": ("rollout", "max_in_flight", int),
    "is_shared": ("attention", "is_shared", lambda text: text == "True"),
}


def _find_output_share(config: RunConfig) -> float | None:
    """Of the parameters that a token is multiplied with, the share that is the output layer's."""
    hidden, vocabulary = (_find(config, "architecture", name) for name in ("hidden_size", "vocab_size"))
    if config.model is None or hidden is None or vocabulary is None:
        return None
    return int(hidden) * int(vocabulary) / config.model.num_multiplied


def _find(config: RunConfig, section: str, name: str) -> str | None:
    value = config.sections.get(section, {}).get(name)
    return None if value is None or value.text == _ABSENT else value.text
