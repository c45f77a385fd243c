"""A service whose processes are killed loses no request, and does none twice."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.tinker import model
from tests.tinker.services import Service, serving

tinker = pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
from tests.tinker.test_service import ADAM, RANK, begin, draw_chats, read, sample  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


def kill(service: Service, name: str) -> None:
    """Kill the rank, the sidecar or the engine of a service."""
    wanted = {"rank": "megatron_rl.tinker --stage", "sidecar": "megatron_rl.tinker.sidecar", "engine": "api_server"}[
        name
    ]
    for one in psutil.process_iter():
        # Others end meanwhile.
        with contextlib.suppress(psutil.Error):
            words = " ".join(one.cmdline())
            if wanted in words and str(service.models) in words:
                os.kill(one.pid, signal.SIGKILL)
                return
    raise AssertionError(f"no {name} was found")


def train(client: Any, training: Any, pause: Any) -> list[bytes]:
    """Train, save, train, sample, load and train, with a pause before each request is awaited."""
    found = []

    def wait(future: Any) -> Any:
        pause()
        return future.result()

    for number in range(6):
        passed, stepped = training.forward_backward(draw_chats(number), "cross_entropy"), training.optim_step(ADAM)
        found += read(wait(passed))
        wait(stepped)
        if number == 2:
            saved = wait(training.save_state("three")).path
        if number == 3:
            sampler = wait(training.save_weights_and_get_sampling_client())
            found += [np.asarray(one.logprobs).tobytes() for one in sample(sampler).sequences]
        if number == 4:
            wait(training.load_state_with_optimizer(saved))
    return found


def test_what_is_killed_is_done_once(tmp_path: Path) -> None:
    model.save(tmp_path / model.NAME)
    with serving(tmp_path, "--seq-length", "256", "--lora-rank", str(RANK)) as service:
        client = service.connect()
        expected = train(client, begin(client), lambda: None)
        kills = iter(["rank", None, None, "sidecar", None, None, "engine", None, None, "rank"] + [None] * 40)

        def pause() -> None:
            name = next(kills)
            if name is not None:
                if name != "engine":
                    # The service starts again only if it has served for a while.
                    time.sleep(61)
                kill(service, name)

        assert train(client, begin(client), pause) == expected
