"""Time a pass of the policy with a teacher or a critic of its size against the same pass without, in turns.

Two stages with a core each, 8 micro-batches, the first update of an iteration: the policy alone has gradients, and no
other role is computed. The teacher gives log-probs of the sampled tokens, or its distribution over the vocabulary.
A critic has a pass with gradients of its own, and no output layer to speak of; a head on the policy has no pass of its
own. Seconds are counted until the slowest rank is done. A model's forward pass is a third of its pass with gradients.
The same teacher in a vLLM server on both cores is timed afterwards, by the responses of the pass.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks import report, trimodel
from benchmarks.trimodel import GROUP_SIZE, MICRO_BATCHES, PROMPT, RESPONSE, STAGES, TINY, draw_updates, in_turns
from megatron_rl.algorithm.declaration import HEAD
from megatron_rl.algorithm.objective import Objective
from megatron_rl.command_line.run import compute_sizes
from megatron_rl.config.settings import RewardConfig, RolloutConfig
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.teachers import open_teachers
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.slots import Identity, IterationSlots
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.mcore.session import start_session
from megatron_rl.trainer.mcore.step.critic import build_critic
from megatron_rl.trainer.mcore.step.policy import build_frozen, build_policy
from megatron_rl.trainer.mcore.step.roles import TriModel
from tests import hf_models
from tests.distributed.grpo_trials import Source, build_batcher
from tests.distributed.training import settings_of
from tests.grpo_problem import Problem
from tests.ranks import run_ranks

# An output layer as large a part of the model as in models of some billions of parameters.
MODEL = {**trimodel.MODEL, "vocab_size": 8192}
FLAGS = (
    f"--lr 1e-6 --lr-decay-style constant --train-iters 1 --grpo-group-size {GROUP_SIZE} --micro-batch-size "
    f"{GROUP_SIZE} --grpo-prompts-per-step {MICRO_BATCHES} --seq-length {PROMPT + RESPONSE} "
    f"--rollout-max-tokens {RESPONSE} --pipeline-model-parallel-size {STAGES}"
)
FORMS = {
    "without": "",
    "sampled": "--opd-divergence sampled",
    "top 64": "--opd-divergence reverse --opd-top-k 64",
    "reverse": "--opd-divergence reverse",
    "jsd": "--opd-divergence jsd",
    "critic": "--algorithm ppo --critic policy",
    "head": "--algorithm ppo --critic head",
}

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds = 1
        MODEL.update(TINY, vocab_size=256)
    with tempfile.TemporaryDirectory() as folder:
        problem, teacher = _draw(Path(folder))
        times = run_ranks(_time, STAGES, problem, teacher, arguments.rounds, timeout=600)[0]
        of_server = asyncio.run(_time_server(problem, teacher, arguments.rounds))
    ratios = {
        f"{'' if 'critic' in FORMS[name] else 'teacher_'}{name.replace(' ', '_')}_vs_without": [
            a / b for a, b in zip(of_form, times["without"], strict=True)
        ]
        for name, of_form in times.items()
        if name != "without"
    }
    # They were not timed in turns.
    ratios["server_vs_without"] = [seconds / statistics.median(times["without"]) for seconds in of_server]
    report.table("a pass of two stages", times, "s")
    report.table("ratios", ratios, "")
    report.finish({name: statistics.median(values) for name, values in ratios.items()})


def _draw(folder: Path) -> tuple[Problem, Path]:
    """Draw a policy, a teacher of its size, and an update of random groups."""
    policy, teacher = (hf_models.draw("qwen3", folder / str(seed), seed, **MODEL) for seed in (0, 1))
    return Problem(policy, policy, draw_updates(1, MODEL["vocab_size"])), teacher


async def _time_server(problem: Problem, teacher: Path, rounds: int) -> list[float]:
    """Return the seconds in which the server of a teacher computes the log-probs of the responses of a pass."""
    groups = [
        wire.Group(
            prompt=wire.Prompt(index=number, row="", tokens=wire.encode_tokens(group.prompt)),
            responses=[_make_response(tokens) for tokens in group.responses],
        )
        for number, group in enumerate(problem.updates[0])
    ]
    rollout = RolloutConfig(folder=problem.policy.parent / "run", dtype="float32")
    settings = SidecarSettings("cpu", None, PROMPT + RESPONSE, rollout, RewardConfig(), teacher=[f"engines:{teacher}"])
    seconds = []
    async with contextlib.AsyncExitStack() as stack:
        teachers = open_teachers(settings, STAGES, stack)
        stack.push_async_callback(teachers.close)
        await teachers.start()
        for _ in range(rounds + 1):
            start = time.monotonic()
            await asyncio.gather(*map(teachers.teach, groups))
            seconds.append(time.monotonic() - start)
    return seconds[1:]


def _make_response(tokens: list[int]) -> wire.Response:
    return wire.Response(
        tokens=wire.encode_tokens(tokens), log_probs=wire.encode_log_probs([0.0] * len(tokens)), finish_reason="stop",
        seed=0, engine="0", spans=[], fingerprint="",
    )  # fmt: skip


def _time(problem: Problem, teacher: Path, rounds: int) -> Times:
    """Return the seconds of each form, which take turns."""
    teaching = f"--teacher {teacher} "
    flags = {name: f"{FLAGS} {teaching * ('opd' in words)}{words}" for name, words in FORMS.items()}
    settings = {name: settings_of(problem.policy, words) for name, words in flags.items()}
    times: Times = defaultdict(list)
    with start_session(settings["without"]) as session:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[session.rank % len(cores)]})
        sizes = compute_sizes(settings["without"], session.num_replicas)
        policy = build_policy(settings["without"], session, 1)
        others = {"teacher": build_frozen(settings["sampled"], session, "teacher").chunks}
        critics = {
            name: build_critic(one.critic, session, 1) for name, one in settings.items() if one.critic is not None
        }
        learners = {
            name: Learner(
                policy,
                TriModel(
                    policy.wrapped,
                    others if one.frozen else {},
                    None,
                    1.0,
                    critic=critics[name].wrapped if name in critics else None,
                    has_heads=one.algorithm.critic == HEAD,
                ),
                Objective(one.algorithm, sizes.longest_response),
                session,
            )
            for name, one in settings.items()
        }
        identity = Identity("run", 0, "fingerprint")
        source = Source(problem, sizes.division, session.replica, identity, is_shuffled=False)
        batchers = {name: build_batcher(one, session.device) for name, one in settings.items()}
        for number in range(rounds + 1):
            for name in in_turns(FORMS, number):
                copier = DeviceCopier(session.platform)
                slots = IterationSlots(source.slot, batchers[name], sizes.division, identity, copier)
                slots.wait_for_all()
                start = max(session.gather(time.monotonic()))
                learners[name].forward_backward(slots, 0)
                seconds = max(session.gather(time.monotonic())) - start
                slots.close()
                for chunk in itertools.chain(policy.wrapped, *(critic.wrapped for critic in critics.values())):
                    chunk.zero_grad_buffer()
                # The first round prepares what the others find ready.
                if number > 0:
                    times[name].append(seconds)
    return dict(times)


if __name__ == "__main__":
    # Under its importable name, where the ranks find the functions they run.
    from benchmarks.roles import main as importable_main

    importable_main()
