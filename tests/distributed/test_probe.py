"""The trainer's own log-probs of a probe equal transformers' in every layout, and show a replica that differs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.shared.protocol import probe
from megatron_rl.shared.protocol.wire import ProbeAnswer, decode_log_probs, decode_tokens
from megatron_rl.trainer.mcore.model.gpt import unwrap
from megatron_rl.trainer.mcore.publish.probe import Probe, ReplicasDiffer
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.ranks import run_ranks
from tests.truth import error_over_bound

LAYOUTS = {
    "qwen3": ("TP2+SP", "PP2", "PP2xVPP2", "DP2+distopt", "CP2"),
    "qwen3_moe": ("EP2", "EP2xCP2", "TP2+SP,EP2,ETP1"),
}
VERSION = 3


class Receiver:
    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.answers: list[ProbeAnswer] = []

    def probed(self, answer: ProbeAnswer) -> None:
        self.answers.append(answer)


def answers(folders: dict[str, Path]) -> dict[tuple[str, str], Any]:
    """Return rank 0's answer in each layout, and the error if a replica holds other weights."""
    torch.distributed.init_process_group("gloo")
    found: dict[tuple[str, str], Any] = {}
    for family, layouts in LAYOUTS.items():
        for layout in layouts:
            with start_session(CASES[layout]) as session:
                model = build(session, CASES[layout], folders[family])
                chunks = [unwrap(chunk) for chunk in model.wrapped]
                ours, receiver = Probe(chunks, session, "run", 100, divisor(CASES[layout].sizes)), Receiver()
                ours.send(VERSION, "fingerprint", receiver if session.rank == 0 else None)
                found[family, layout] = (ours.tokens(VERSION), receiver.answers)
                if layout == "TP2+SP":
                    found["adapters", layout] = _later_versions(session, chunks)
                if session.num_replicas > 1 and "EP" not in layout:
                    found["error", layout] = _differing(session, chunks, ours)
    return found


def _later_versions(session: Any, chunks: list[Any]) -> list[tuple[int, int]]:
    """Return how many tokens rank 0 asks for and answers in versions of adapters; the second one is published twice."""
    ours, receiver = Probe(chunks, session, "run", 100, 2, is_base_proved=True), Receiver()
    for version in (3, 4, 4, 5):
        asked = ours.tokens(version) if session.rank == 0 else b""
        ours.send(version, "fingerprint", receiver if session.rank == 0 else None)
        receiver.asked.append(asked)
    return (
        [
            (len(decode_tokens(asked)), len(decode_log_probs(answer.log_probs)))
            for asked, answer in zip(receiver.asked, receiver.answers, strict=True)
        ]
        if session.rank == 0
        else []
    )


def _differing(session: Any, chunks: list[Any], ours: Probe) -> str:
    """Return the error after one replica alone has made a step of an update."""
    if session.replica == 1:
        with torch.no_grad():
            chunks[0].decoder.layers[1].mlp.linear_fc2.weight.mul_(1.5)
    with pytest.raises(ReplicasDiffer) as error:
        ours.send(VERSION, "fingerprint", Receiver())
    return str(error.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in LAYOUTS}


def test_every_layout_answers_a_probe_with_the_log_probs_of_transformers(folders):
    found = run_ranks(answers, 2, folders)[0]
    for family, layouts in LAYOUTS.items():
        for layout in layouts:
            tokens, (answer,) = found[family, layout]
            asked = decode_tokens(tokens).tolist()
            assert (answer.version, answer.fingerprint, answer.dtype, answer.bound) == (
                3,
                "fingerprint",
                "float32",
                None,
            )
            assert len(asked) == probe.count_tokens()
            (theirs,), (truth,) = (
                hf_models.log_probs(folders[family], [asked], dtype=dtype) for dtype in (torch.float32, torch.float64)
            )
            ours = torch.from_numpy(decode_log_probs(answer.log_probs).copy())
            assert error_over_bound(ours, theirs, truth) <= 1, (family, layout)
    assert found["adapters", "TP2+SP"] == [(64, 63), (8, 7), (8, 7), (8, 7)]
    assert "replica 1 differs from replica 0: with version 3" in found["error", "DP2+distopt"]


def test_a_probe_follows_from_its_version_stays_in_the_vocabulary_and_is_longer_for_experts():
    assert probe.draw_tokens(5, 100) == probe.draw_tokens(5, 100) != probe.draw_tokens(6, 100)
    assert {token for version in range(40) for token in probe.draw_tokens(version, 100)} == set(range(100))
    assert probe.count_tokens() == 64 == probe.count_tokens(8, 4) < probe.count_tokens(128, 8)
