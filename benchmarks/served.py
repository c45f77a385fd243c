"""Time a client's `forward_backward` against the same groups in an update of a run, in turns.

One rank with a core, 8 micro-batches of a prompt and its responses, the policy alone. The service's time is that from
the message for the ranks to the message with their result: what the data are laid out from, and the log-probs that go
back, are in it. A client sends the log-probs of all tokens, and so the prompt's have a pass through the output layer.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import report, trimodel
from benchmarks.trimodel import GROUP_SIZE, MICRO_BATCHES, PROMPT, RESPONSE, TINY, draw_updates, in_turns
from megatron_rl.algorithm.objective import Objective
from megatron_rl.command_line.run import compute_sizes
from megatron_rl.tinker import work
from megatron_rl.tinker.worker import Worker
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.slots import Identity, IterationSlots
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.loop.stop import StopRequest
from megatron_rl.trainer.mcore.session import start_session
from megatron_rl.trainer.mcore.step.policy import build_policy
from megatron_rl.trainer.mcore.step.roles import TriModel
from tests import hf_models
from tests.distributed.grpo_trials import Source, build_batcher
from tests.distributed.training import settings_of
from tests.grpo_problem import Problem
from tests.grpo_twin import Group
from tests.ranks import run_ranks

MODEL = {**trimodel.MODEL, "vocab_size": 8192}
FLAGS = (
    f"--lr 1e-6 --lr-decay-style constant --train-iters 1 --grpo-group-size {GROUP_SIZE} --micro-batch-size "
    f"{GROUP_SIZE} --grpo-prompts-per-step {MICRO_BATCHES} --seq-length {PROMPT + RESPONSE} "
    f"--rollout-max-tokens {RESPONSE}"
)
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds = 1
        MODEL.update(TINY, vocab_size=256)
    with tempfile.TemporaryDirectory() as folder:
        policy = hf_models.draw("qwen3", Path(folder), 0, **MODEL)
        problem = Problem(policy, policy, draw_updates(1, MODEL["vocab_size"]))
        times = run_ranks(_time, 1, problem, arguments.rounds, timeout=600)[0]
    ratios = [served / own for served, own in zip(times["service"], times["run"], strict=True)]
    report.table("forward and backward of an update", times, "s")
    report.table("ratio", {"service_vs_run": ratios}, "")
    report.finish({"service_vs_run": statistics.median(ratios)})


def _list_data(groups: list[Group]) -> list[work.Datum]:
    """Write groups as a client does: every token but the first is a target, and only sampled ones have advantages."""
    data = []
    for group in groups:
        for tokens, advantage, log_probs in zip(group.responses, group.rewards, group.engine, strict=True):
            whole, given = np.asarray([*group.prompt, *tokens], "<i4"), len(group.prompt) - 1
            values = {"logprobs": [0.0] * given + log_probs, "advantages": [0.0] * given + [advantage] * len(tokens)}
            inputs = {name: np.asarray(of_name, "<f4").tobytes() for name, of_name in values.items()}
            own = bytes(given) + b"\1" * len(tokens)
            data.append(work.Datum(whole[:-1].tobytes(), whole[1:].tobytes(), inputs, own=own))
    return data


def _time(problem: Problem, rounds: int) -> Times:
    """Return the seconds of each, which take turns."""
    settings, times = settings_of(problem.policy, FLAGS), defaultdict[str, list[float]](list)
    with start_session(settings) as session:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sizes = compute_sizes(settings, session.num_replicas)
        policy = build_policy(settings, session, 1)
        tri_model = TriModel(policy.wrapped, {}, None, 1.0)
        learner = Learner(policy, tri_model, Objective(settings.algorithm, sizes.longest_response), session)
        identity = Identity("run", 0, "fingerprint")
        source = Source(problem, sizes.division, session.replica, identity, is_shuffled=False)
        batcher, nothing = build_batcher(settings, session.device), _nothing()
        # A micro-batch has room for one group.
        most_tokens = PROMPT + GROUP_SIZE * RESPONSE
        stop = StopRequest(1.0, lambda error: None)
        worker = Worker(settings, session, policy, nothing, nothing, stop, most_tokens)
        worker.do(work.Create(model="m", seed=1))
        data = _list_data(problem.updates[0])

        def serve() -> None:
            wanted = work.Pass(model="m", data=data, loss="ppo", settings={})
            sent = msgspec.msgpack.encode(work.Assigned(number=1, work=wanted))
            assigned = work.ASSIGNED.decode(sent)
            assert assigned is not None
            result = worker.do(assigned.work)
            assert isinstance(result, work.PassDone)
            msgspec.msgpack.encode(result)

        def run() -> None:
            slots = IterationSlots(source.slot, batcher, sizes.division, identity, DeviceCopier(session.platform))
            slots.wait_for_all()
            learner.forward_backward(slots, 0)
            slots.close()

        ways = {"run": run, "service": serve}
        for number in range(rounds + 1):
            for name in in_turns(ways, number):
                for chunk in policy.wrapped:
                    chunk.zero_grad_buffer()
                worker.do(work.Create(model="m", seed=1))
                start = time.monotonic()
                ways[name]()
                # The first round prepares what the others find ready.
                if number > 0:
                    times[name].append(time.monotonic() - start)
    return dict(times)


def _nothing() -> Any:
    """Stand for the sidecar, of which passes need nothing."""
    return None


if __name__ == "__main__":
    # Under its importable name, where the ranks find the functions they run.
    from benchmarks.served import main as importable_main

    importable_main()
