"""`megatron-rl plan`: predicts the time of a run's iterations, and divides devices between trainer and engines.

    megatron-rl plan --hf-model MODEL --chip CHIP --devices N ...    the best split, from data sheets
    megatron-rl plan RUN... [--rollout-num-engines N ...]            the effect of changes of a run, from its times

RUN is a folder with metrics.jsonl and audit.jsonl; its config.json and its trace supply the rest. If a folder lacks
these, append what is missing: RUN,stages=2,schedule=sync,max-num-seqs=256,max-in-flight=512,engine=scripted,virtual=2.
With several runs, the errors of predicting each from the others are printed too.
"""

import argparse
import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.analysis.picture import check_format
from megatron_rl.analysis.plan import picture as plan_picture
from megatron_rl.analysis.plan.calibrate import MeasuredRun, calibrate
from megatron_rl.analysis.plan.chips import CHIPS, find_figures
from megatron_rl.analysis.plan.command_lines import Files, list_notes, write_command
from megatron_rl.analysis.plan.costs import (
    SCHEDULES,
    BatchingCosts,
    Costs,
    DraftCosts,
    EngineCosts,
    Schedule,
    Setting,
    Talk,
)
from megatron_rl.analysis.plan.doubts import apply_bounds, describe_errors, find_doubts, leave_one_out
from megatron_rl.analysis.plan.figures import TrainedAdapters
from megatron_rl.analysis.plan.lengths import Lengths, Lognormal, Uniform, parse_lengths
from megatron_rl.analysis.plan.results import Result
from megatron_rl.analysis.plan.runs import read_run
from megatron_rl.analysis.plan.search import Candidate, Wanted, describe_candidates, search
from megatron_rl.analysis.plan.simulate import simulate
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.flag import IntegerOr
from megatron_rl.observe import metrics
from megatron_rl.observe.run_folder import find_run
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.types import Architecture

_NUM_SHOWN = 8
# For a run that the flags do not describe: TRL's and our own defaults.
_PROMPTS, _GROUP_SIZE = 128, 8


def main(argv: list[str]) -> int:
    arguments = _make_parser().parse_args(argv)
    if arguments.out is not None:
        check_format(arguments.out)
    if arguments.runs:
        _predict(arguments)
    else:
        _search(arguments)
    return ExitCode.OK


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="runs to calibrate on")
    parser.add_argument("--out", type=Path, help="the file for a picture of the time by part: .png, .svg or .pdf")
    parser.add_argument("--iterations", type=int, default=5, help="number of iterations to simulate")
    run = parser.add_argument_group("the run; with RUN, the changes to it")
    run.add_argument("--schedule", choices=SCHEDULES)
    run.add_argument("--grpo-prompts-per-step", type=int, metavar="N")
    run.add_argument("--grpo-group-size", type=int, metavar="N")
    run.add_argument("--micro-batch-size", type=int, metavar="N")
    run.add_argument("--updates", type=int, metavar="N", help="updates of an iteration")
    run.add_argument("--prompt-length", metavar="LENGTHS", help="fixed:N, uniform:LEAST:MOST, lognormal:MEAN:SIGMA")
    run.add_argument("--response-length", metavar="LENGTHS")
    run.add_argument("--reward-seconds", type=float, metavar="S", help="seconds of a group's reward, in one worker")
    run.add_argument("--reward-workers", type=int, metavar="N")
    run.add_argument("--turns", type=float, metavar="N", help="mean turns of a response with an environment")
    run.add_argument("--environment-seconds", type=float, metavar="S", help="seconds of an answer of an environment")
    run.add_argument("--staleness", type=int, metavar="N", help="schedule async: iterations ahead")
    changed = parser.add_argument_group("with RUN")
    changed.add_argument("--rollout-num-engines", type=int, metavar="N")
    changed.add_argument("--rollout-max-num-seqs", type=int, metavar="N")
    changed.add_argument("--rollout-max-in-flight", type=IntegerOr(("auto",)), metavar="N", help="or auto")
    changed.add_argument("--replicas", type=int, metavar="N", help="replicas of the trainer's model")
    changed.add_argument("--pipeline-model-parallel-size", type=int, metavar="N")
    changed.add_argument("--engine-speed", type=float, default=1.0, metavar="F", help="engines F times as fast")
    changed.add_argument("--trainer-speed", type=float, default=1.0, metavar="F", help="a trainer F times as fast")
    changed.add_argument("--draft-acceptance", type=float, metavar="A", help="engines draft, and accept this share")
    changed.add_argument("--draft-tokens", type=int, default=DraftCosts.num_tokens, metavar="K", help="of a draft")
    changed.add_argument("--draft-cost", type=float, default=0.0, metavar="C", help="of drafting a token, in steps")
    found = parser.add_argument_group("without RUN")
    found.add_argument("--hf-model", type=Path, metavar="MODEL", help="a folder with config.json")
    found.add_argument("--weights-bridge", metavar="FILE.py:NAME", help="a model family of your own that reads MODEL")
    found.add_argument("--chip", default="h100", help=", ".join(CHIPS))
    found.add_argument("--devices", type=int, metavar="N")
    found.add_argument("--devices-per-host", type=int, default=8, metavar="N")
    found.add_argument("--max-prompt-tokens", type=int, default=1024, metavar="N")
    found.add_argument("--rollout-max-tokens", type=int, default=8192, metavar="N")
    found.add_argument("--reference", action="store_true", help="a reference model beside the policy")
    found.add_argument("--recompute", action="store_true", help="all layers are computed again in the backward pass")
    found.add_argument("--lora-rank", type=int, metavar="N", help="adapters of this rank are trained, and no weights")
    found.add_argument("--publish-lora", choices=("merged", "adapter"), default="merged", help="as in a run")
    found.add_argument("--simulate", type=int, default=16, metavar="N", help="number of fitting splits to simulate")
    return parser


# From runs.


def _predict(arguments: argparse.Namespace) -> None:
    runs = [_read_run(text) for text in arguments.runs]
    costs = calibrate(runs)
    setting = _change(runs[0].setting, arguments)
    costs = _change_costs(apply_bounds(runs[0], costs), arguments)
    if arguments.draft_acceptance is not None:
        costs = dataclasses.replace(costs, engine=_add_drafts(costs.engine, runs, arguments))
    results: dict[Schedule, Result] = {}
    for schedule in SCHEDULES:
        # A run with divided devices does not show how all of them together would sample.
        if schedule == setting.schedule or schedule != "colocated":
            asked = dataclasses.replace(setting, schedule=schedule)
            results[schedule] = simulate(asked, costs, arguments.iterations)
    for line in _describe_costs(costs):
        print(line)
    print()
    for line in _describe_schedules(results):
        print(line)
    for line in _describe_ledger(results[setting.schedule], setting.schedule):
        print(line)
    print()
    for line in [*describe_errors(leave_one_out(runs)), *find_doubts(setting, runs, costs.engine)]:
        print(line)
    if arguments.out is not None:
        plan_picture.draw({str(name): result for name, result in results.items()}, arguments.out)
        print(f"written to {arguments.out}")


def _read_run(text: str) -> MeasuredRun:
    """Read RUN,name=value,...; the values are for facts that the run's files do not contain."""
    path, *settings = text.split(",")
    layout: dict[str, Any] = {}
    names = {
        "stages": ("num_stages", int), "virtual": ("num_virtual", int), "schedule": ("schedule", str),
        "engine": ("engine", str), "max-num-seqs": ("max_running", int), "max-in-flight": ("max_in_flight", int),
        "frozen": ("num_frozen", int), "trainer-devices": ("trainer_devices", int),
        "engine-devices": ("engine_devices", int),
    }  # fmt: skip
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in names:
            raise UsageError(f"{text}: {name} must be one of {', '.join(names)}: write one")
        field, read = names[name]
        try:
            layout[field] = read(value)
        except ValueError:
            raise UsageError(f"{text}: {name}={value} must be a whole number: write one") from None
    for name, allowed in (("schedule", SCHEDULES), ("engine", ("batching", "scripted"))):
        if layout.get(name, allowed[0]) not in allowed:
            raise UsageError(f"{text}: {name}={layout[name]} must be one of {', '.join(allowed)}: write one")
    folder = find_run(Path(path), metrics.FILE_NAME)
    folder = folder.parent if folder.is_file() else folder
    return read_run(folder, layout)


def _change(setting: Setting, arguments: argparse.Namespace) -> Setting:
    """Return the setting with the command line's changes."""
    _check_counts(arguments)
    changes: dict[str, Any] = {
        "schedule": arguments.schedule,
        "num_prompts": arguments.grpo_prompts_per_step,
        "group_size": arguments.grpo_group_size,
        "micro_batch_size": arguments.micro_batch_size or arguments.grpo_group_size,
        "num_updates": arguments.updates,
        "num_engines": arguments.rollout_num_engines,
        "num_replicas": arguments.replicas,
        "num_stages": arguments.pipeline_model_parallel_size,
        "reward_workers": arguments.reward_workers,
        "staleness": arguments.staleness,
    }
    for name, text in (("prompts", arguments.prompt_length), ("responses", arguments.response_length)):
        if text is not None:
            changes[name] = parse_lengths(text, "--prompt-length" if name == "prompts" else "--response-length")
    changes = {name: value for name, value in changes.items() if value is not None}
    changes["talk"] = _change_talk(setting.talk, arguments)
    of_rank = setting.trainer_devices / (setting.num_replicas * setting.num_stages)
    of_engine = setting.engine_devices / setting.num_engines
    changed = dataclasses.replace(setting, **changes)
    return dataclasses.replace(
        changed,
        trainer_devices=round(of_rank * changed.num_replicas * changed.num_stages),
        engine_devices=round(of_engine * changed.num_engines),
    )


def _change_talk(talk: Talk, arguments: argparse.Namespace) -> Talk:
    turns, seconds = arguments.turns, arguments.environment_seconds
    if turns is not None and not 1 <= turns < math.inf:
        raise UsageError(f"--turns {turns:g} must be a finite number, at least 1: write one")
    if seconds is not None and not 0 <= seconds < math.inf:
        raise UsageError(f"--environment-seconds {seconds:g} must be a finite number, at least 0: write one")
    return Talk(
        talk.turns if turns is None else turns,
        talk.given_share,
        talk.seconds if seconds is None else seconds,
    )


def _check_counts(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        least = 0 if name == "staleness" else 1
        if type(value) is int and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least {least}: write one that is")
    seconds = arguments.reward_seconds
    if seconds is not None and not 0 <= seconds < math.inf:
        raise UsageError(f"--reward-seconds {seconds:g} must be a finite number, at least 0: write one")


def _change_costs(costs: Costs, arguments: argparse.Namespace) -> Costs:
    for flag, value in (("--engine-speed", arguments.engine_speed), ("--trainer-speed", arguments.trainer_speed)):
        if not 0 < value < float("inf"):
            raise UsageError(f"{flag} {value:g} must be a finite number above 0: write one")
    fast, trainer = arguments.engine_speed, costs.trainer
    engine = costs.engine.faster(fast)
    if arguments.rollout_max_num_seqs is not None and isinstance(engine, BatchingCosts):
        engine = dataclasses.replace(engine, max_running=arguments.rollout_max_num_seqs)
    engine = _change_in_flight(engine, arguments.rollout_max_in_flight)
    reward = costs.reward if arguments.reward_seconds is None else arguments.reward_seconds
    return dataclasses.replace(costs, engine=engine, trainer=trainer.faster(arguments.trainer_speed), reward=reward)


def _change_in_flight(engine: EngineCosts, number: int | str | None) -> EngineCosts:
    """Return the costs of engines that are given this number of responses at once; None leaves them as they are."""
    if not isinstance(engine, BatchingCosts):
        if isinstance(number, str):
            raise UsageError(
                f"--rollout-max-in-flight {number} needs a run with vLLM, or with scripted engines that have "
                "step_seconds: write N"
            )
        return engine if number is None else dataclasses.replace(engine, max_in_flight=number)
    if isinstance(number, int):
        return dataclasses.replace(engine, max_in_flight=number, is_chosen=False)
    is_chosen = engine.is_chosen or number is not None
    return dataclasses.replace(engine, max_in_flight=2 * engine.max_running, is_chosen=True) if is_chosen else engine


def _add_drafts(engine: EngineCosts, runs: Sequence[MeasuredRun], arguments: argparse.Namespace) -> EngineCosts:
    """Return the costs of engines that draft, unlike those of the runs."""
    drafts = DraftCosts(arguments.draft_acceptance, arguments.draft_tokens, arguments.draft_cost)
    if not 0 <= drafts.acceptance <= 1:
        raise UsageError(f"--draft-acceptance {drafts.acceptance:g} must be a share, from 0 to 1: write one")
    if not 0 <= drafts.cost < math.inf:
        raise UsageError(f"--draft-cost {drafts.cost:g} must be a finite number, at least 0: write one")
    if not isinstance(engine, BatchingCosts):
        raise UsageError("--draft-acceptance needs a run with vLLM, or with scripted engines that have step_seconds")
    if any(one.has_drafts for run in runs for one in run.record.iterations):
        raise UsageError("--draft-acceptance: engines drafted in these runs, so their times hold for that: drop it")
    return engine.drafting(drafts)


def _describe_costs(costs: Costs) -> list[str]:
    engine, trainer = costs.engine, costs.trainer
    if isinstance(engine, BatchingCosts):
        of_engine = (
            f"a step {1e3 * engine.step:.3g} ms, and {1e6 * engine.per_sequence:.3g} us a response, "
            f"{1e9 * engine.per_context:.3g} ns a token of context; a token of a prompt "
            f"{1e6 * engine.per_prompt_token:.3g} us"
        )
    else:
        speed = f"{engine.tokens_per_second:.0f} tokens/s" if engine.tokens_per_second else "any speed"
        of_engine = f"scripted, {speed}, a delay of {engine.delay[0]:.3g} to {engine.delay[1]:.3g} s"
    return [
        f"engine   {of_engine}",
        f"trainer  {1e6 * trainer.per_token:.3g} us a token, {1e9 * trainer.per_pair:.3g} ns a pair, "
        f"{1e3 * trainer.per_micro_batch:.3g} ms a micro-batch; update {trainer.update:.3g} s",
        f"publish  {costs.publish:.3g} s; other {costs.other:.3g} s",
    ]


def _describe_schedules(results: dict[Schedule, Result]) -> list[str]:
    lines = [f"{'schedule':<14}{'iteration':>12}{'tokens/s/device':>17}{'trainer busy':>14}{'engines busy':>14}"]
    for name, result in results.items():
        trainer, engines = (result.mean(of)["busy"] / result.seconds for of in (False, True))
        lines.append(f"{name:<14}{result.seconds:>10.2f} s{result.tpspd:>17.1f}{trainer:>14.0%}{engines:>14.0%}")
    return lines


def _describe_ledger(result: Result, title: str) -> list[str]:
    lines = ["", f"{title}, seconds of an iteration"]
    for name, of_engines in (("trainer", False), ("engines", True)):
        parts = {
            part: seconds for part, seconds in result.mean(of_engines).items() if seconds > 0.0005 * result.seconds
        }
        lines.append(
            f"  {name:<9}" + ", ".join(f"{part.replace('_', ' ')} {value:.2f}" for part, value in parts.items())
        )
    if result.opening is not None:
        lines.append(f"  each engine is given {result.opening}")
    return lines


# From data sheets.


def _search(arguments: argparse.Namespace) -> None:
    wanted = _read_wanted(arguments)
    candidates = search(wanted, arguments.simulate, arguments.iterations, print)
    shown = candidates[:_NUM_SHOWN]
    for line in describe_candidates(shown):
        print(line)
    best = shown[0]
    assert best.result is not None
    for line in _describe_ledger(best.result, "the best"):
        print(line)
    print()
    if best.setting.schedule in ("periodic", "sync"):
        for words in write_command(
            best, wanted, Files(str(arguments.hf_model), weights_bridge=arguments.weights_bridge)
        ):
            print(" ".join(word if word.startswith("$") else shlex.quote(word) for word in words))
        for note in list_notes(best, wanted):
            print(note)
        print(
            f"count its memory before you start it: megatron-rl doctor --device-gib {wanted.chip.gib:g} --fit "
            f"{best.split.trainer_devices} FLAGS"
        )
    for doubt in find_doubts(best.setting, []):
        print(doubt)
    if arguments.out is not None:
        results = {f"{place}: {_name(one)}": one.result for place, one in enumerate(shown, 1) if one.result is not None}
        plan_picture.draw(results, arguments.out)
        print(f"written to {arguments.out}")


def _name(candidate: Candidate) -> str:
    split = candidate.split
    sizes = {"TP": split.tensor, "PP": split.pipeline, "CP": split.context, "EP": split.expert}
    divided = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{split.trainer_devices} + {split.num_engines} x {split.engine_tensor}\n{divided}"


def _read_wanted(arguments: argparse.Namespace) -> Wanted:
    missing = [
        f"{flag} is missing: {remedy}"
        for flag, value, remedy in (
            ("--hf-model", arguments.hf_model, "write a folder with config.json, or name a RUN to calibrate on"),
            ("--devices", arguments.devices, "write their number, or name a RUN to calibrate on"),
        )
        if value is None
    ]
    if missing:
        raise UsageError(*missing)
    if arguments.devices < 2:
        raise UsageError(
            f"--devices {arguments.devices} must be at least 2, one that trains and one that samples: write more"
        )
    prompt, response = arguments.max_prompt_tokens, arguments.rollout_max_tokens
    group_size = arguments.grpo_group_size or _GROUP_SIZE
    base = Setting(
        schedule="periodic",
        num_prompts=_PROMPTS,
        group_size=group_size,
        micro_batch_size=group_size,
        prompts=Uniform(max(1, prompt // 4), prompt),
        # Like reasoning models' responses: a quarter of the bound on average, with a tail that reaches it.
        responses=Lognormal(response / 4, 0.8, response),
    )
    changed = _change(base, arguments)
    architecture = read_architecture(arguments.hf_model, arguments.weights_bridge)
    if prompt + response > architecture.max_position_embeddings:
        raise UsageError(
            f"--max-prompt-tokens {prompt} and --rollout-max-tokens {response} are {prompt + response} tokens "
            f"together, above the model's longest sequence, {architecture.max_position_embeddings}: lower one of them"
        )
    return Wanted(
        architecture=architecture,
        chip=find_figures(arguments.chip),
        num_devices=arguments.devices,
        devices_per_host=arguments.devices_per_host,
        setting=dataclasses.replace(
            changed,
            prompts=_bound(changed.prompts, "--prompt-length", "--max-prompt-tokens", prompt),
            responses=_bound(changed.responses, "--response-length", "--rollout-max-tokens", response),
        ),
        longest_prompt=prompt,
        longest_response=response,
        num_frozen=int(arguments.reference),
        recomputes=arguments.recompute,
        adapters=_read_adapters(arguments, architecture),
    )


def _read_adapters(arguments: argparse.Namespace, architecture: Architecture) -> TrainedAdapters | None:
    is_alone = arguments.publish_lora == "adapter"
    if arguments.lora_rank is None and not is_alone:
        return None
    if arguments.lora_rank is None or arguments.lora_rank < 1:
        raise UsageError("--lora-rank must be at least 1: write the rank of the adapters, or drop --publish-lora")
    if is_alone and architecture.experts is not None:
        raise UsageError("--publish-lora adapter: adapters of experts cannot come alone yet: write merged")
    return TrainedAdapters.of(architecture, arguments.lora_rank, is_alone)


def _bound(lengths: Lengths, flag: str, bound_flag: str, bound: int) -> Lengths:
    """Cut an unbounded tail at the run's bound; refuse lengths that the run cannot have."""
    if isinstance(lengths, Lognormal) and math.isinf(lengths.most) and lengths.uncut_mean <= bound:
        return dataclasses.replace(lengths, most=bound)
    if lengths.most > bound:
        reached = lengths.uncut_mean if isinstance(lengths, Lognormal) and math.isinf(lengths.most) else lengths.most
        raise UsageError(
            f"{flag} reaches {reached:g} tokens, above {bound_flag} {bound}, the run's bound: shorten it, or raise "
            f"{bound_flag}"
        )
    return lengths
