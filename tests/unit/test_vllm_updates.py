"""An engine tries at its start how its weights can be replaced: copied in place, by vLLM, or not at all."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron_rl.sidecar.engines import EngineRefused, ProbeReport, WrongWeights
from megatron_rl.sidecar.vllm.updates import Updates

RIGHT, WRONG = [-1.0, -2.0], [-1.0, -2.5]
COPIES, RELOAD = "copied in place", "loaded by vLLM"


FACTS = {"moe_patch": "", "vllm": "0.32", "dtype": "float32"}


class Engine:
    """An engine whose probe depends on how its weights were loaded last."""

    def __init__(
        self, probes: Mapping[str, list[float] | None], obstacles: Sequence[Sequence[str]], is_adopted: bool
    ) -> None:
        self.post = self.send = self.ask
        self.is_adopted = is_adopted
        self.probes = probes
        self.obstacles = [list(own) for own in obstacles]
        self.held = "started"
        self.asked: list[str] = []

    async def ask(self, step: str, route: str, content: object = None) -> Any:
        self.asked.append(route.rpartition("/")[2].partition("?")[0])

    async def probe(self, tokens: Sequence[int]) -> ProbeReport:
        self.asked.append("probe")
        log_probs = self.probes.get(self.held, RIGHT)
        if log_probs is None:
            raise WrongWeights("its log-probs of the probe are not finite")
        return ProbeReport(log_probs, None)  # type: ignore[arg-type]

    async def call_workers(self, step: str, method: str, *arguments: str) -> list[dict[str, Any]]:
        method = method.removeprefix("megatron_rl_")
        self.asked.append(" ".join((method, *arguments)).strip())
        if method == "learn_order":
            self.held = "random"
        elif method == "leave_loads_to_vllm":
            self.obstacles = [[arguments[0]] for _ in self.obstacles]
        elif method == "reload_checkpoint":
            self.held = RELOAD if arguments == ("vllm",) or any(self.obstacles) else COPIES
        return [{"unknown": [], "reloaded": True, "obstacles": list(own)} for own in self.obstacles]


def check(engine: Engine) -> Engine:
    updates = Updates("e", FACTS, engine, engine.call_workers, engine.probe)  # type: ignore[arg-type]
    asyncio.run(updates.check(is_started_here=not engine.is_adopted))
    return engine


def test_weights_that_can_be_copied_in_place_are_tried_once_and_left_so() -> None:
    engine = check(Engine({}, [[], []], is_adopted=False))
    assert engine.obstacles == [[], []]
    assert engine.asked == ["probe", "pause", "learn_order", "reload_checkpoint", "reset_prefix_cache", "probe"]


@pytest.mark.parametrize("is_adopted", [False, True])
@pytest.mark.parametrize("copied", [WRONG, None, [float("nan"), -2.0]])
def test_a_copy_that_gives_other_log_probs_than_vllm_is_given_up_by_name(copied, is_adopted, caplog) -> None:
    caplog.set_level(logging.INFO)
    engine = check(Engine({COPIES: copied}, [[], []], is_adopted))
    reason = "after a copy, the log-probs of the probe are others than after vLLM's reload"
    assert engine.obstacles == [[reason], [reason]]
    assert engine.held == RELOAD
    assert [reason in record.message for record in caplog.records].count(True) == 1
    assert engine.asked[-5:-1] == ["pause", "reload_checkpoint vllm", "reset_prefix_cache", "probe"]


def test_an_adopted_engine_whose_copies_and_reloads_agree_keeps_its_copies() -> None:
    engine = check(Engine({"started": WRONG}, [[], []], is_adopted=True))
    assert engine.obstacles == [[], []]
    assert engine.asked[-4:] == ["pause", "reload_checkpoint vllm", "reset_prefix_cache", "probe"]


def test_an_obstacle_of_one_worker_counts_for_all_and_is_logged_once(caplog) -> None:
    caplog.set_level(logging.INFO)
    engine = check(Engine({COPIES: WRONG}, [[], ["2 parameters are packed: a, b"]], is_adopted=False))
    assert engine.obstacles == [["2 parameters are packed: a, b"]] * 2
    assert engine.held == RELOAD
    (record,) = [record for record in caplog.records if "packed" in record.message]
    assert record.message.startswith("engine e: vLLM loads weights, since they cannot be copied in place: 2 param")


@pytest.mark.parametrize("obstacles", [[], ["packed"]])
def test_an_engine_that_no_load_brings_back_is_refused(obstacles) -> None:
    with pytest.raises(EngineRefused, match="cannot update this model here"):
        check(Engine({COPIES: WRONG, RELOAD: WRONG}, [obstacles], is_adopted=False))
    with pytest.raises(WrongWeights, match="not finite"):
        check(Engine({COPIES: None, RELOAD: None}, [obstacles], is_adopted=False))
