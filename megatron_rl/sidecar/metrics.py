"""The service's status in Prometheus' text format."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

_PREFIX = "megatron_rl_rollout"


def exposition(status: dict[str, Any]) -> bytes:
    """One gauge a number; what is counted over the sidecar's life only grows."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> None:
        metric = Gauge(f"{_PREFIX}_{name}", text, labels, registry=registry)
        for key, value in values.items():
            (metric.labels(*key) if labels else metric).set(value)

    version = status["version"]
    gauge("version", "The version that engines hold; -1 for none.", {(): -1 if version is None else version})
    for name, value in status["counters"].items():
        gauge(name, f"The sidecar's {name.replace('_', ' ')}.", {(): value})
    gauge("slots_waited_for", "Slots that ranks wait for.", {(): len(status["slots_waited_for"])})
    iteration = status["iteration"]
    if iteration is not None:
        groups = {(progress,): count for progress, count in iteration["groups"].items()}
        gauge("iteration_groups", "Groups of the current iteration.", groups, ("progress",))
        gauge("iteration_failed", "1 when the current iteration has failed.", {(): iteration["failure"] is not None})
    engines = status["engines"].get("engines", {})
    for key, text in (("in_flight", "Responses in flight."), ("restarts", "Starts after a death.")):
        gauge(f"engine_{key}", text, {(name,): engine[key] for name, engine in engines.items()}, ("engine",))
    ready = {(name,): engine["state"] == "ready" for name, engine in engines.items()}
    gauge("engine_ready", "1 when the engine takes groups.", ready, ("engine",))
    return generate_latest(registry)
