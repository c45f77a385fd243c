"""Run benchmarks one after another: `python -m benchmarks [NAME...] [--tiny] [--record]`.

Each prints its tables as it runs. Without names all run, and their results are recorded: in results.json, which keeps
the last outcome of each, and for people in RESULTS.md and a picture.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ranks import ROOT

# The keys of each one's last line, with their meanings.
BENCHMARKS: Mapping[str, Mapping[str, str]] = {
    "weights": {
        "import_vs_copy": "import of 1 B parameters on two ranks / a copy of their bytes",
        "export_vs_copy": "their export, fingerprint included / writing the same bytes",
        "import_peak_vs_shard": "memory that an import takes / the rank's own shard",
    },
    "checkpoints": {
        "save_peak_vs_state": "memory of a rank that saves / its weights and its part of the optimizer's state",
        "load_peak_vs_state": "memory of a rank that loads / the same",
    },
    "publish": {
        "seconds_40m": "seconds of a publish to one engine, 40 M parameters, fp32",
        "seconds_400m_bf16": "seconds of a publish to one engine, 0.4 B parameters, bf16",
        "vs_copy_40m": "a publish of 40 M parameters / a copy of their bytes",
        "vs_copy_400m": "a publish of 0.4 B parameters / a copy of their bytes",
        "fixed_ms": "milliseconds of a publish of 0.1 M parameters",
    },
    "publish_lora": {
        "lora_vs_merged": "a publish of adapters of rank 8 / of merged weights, 40 M parameters, fp32",
        "moved_vs_merged": "its writing and loading / the same of merged weights",
        "bytes_vs_merged": "its bytes / the same of merged weights",
    },
    "batch_invariant": {
        "share_before": "share of sampled tokens whose log-probs differ between vLLM on a CPU and the trainer, fp32",
        "differing_after": "tokens that differ with --batch-invariant",
        "tokens_after": "of this number of tokens",
        "sampling_vs_before": "tokens a second of the engine with the flag / without it, 64 responses at a time",
        "pack_vs_before": "seconds of the trainer for a pack with the flag / without it, forward and backward",
    },
    "delivery": {
        "gb_s_1": "GB a second of weights to a host over loopback, one stream",
        "gb_s_2": "the same, two streams",
        "gb_s_4": "the same, four streams",
        "vs_sockets": "weights a second over four streams / bytes a second over four bare sockets",
        "vs_copy": "the same / bytes a second of a plain copy",
    },
    "sidecar": {
        "ms_per_group_scripted": "milliseconds of the service for a group of 16 x 256 tokens",
        "gib_scripted": "GiB of the service with 4,096 such groups",
        "loop_ms_per_group_4096": "milliseconds of its event loop's thread for a group of 16 x 4,096 tokens",
        "service_vs_raw_tokens": "tokens a second through the service / through a bare client of the engine",
        "service_vs_offline_tiny": "tokens a second through the service / of vLLM's own LLM.generate, 0.1 M parameters",
        "service_vs_offline_40m": "the same / the same, 40 M parameters",
    },
    "drafts": {
        "ngram_repetitive": "tokens a second with n-gram drafts / without, responses that repeat themselves",
        "length_repetitive": "tokens that such a response gets in a step with a draft",
        "ngram_repetitive_16": "the same ratio, 16 responses at once",
        "length_repetitive_16": "their tokens in a step with a draft",
        "ngram_random": "the same ratio at temperature 2, where hardly a draft is accepted",
        "length_random": "its tokens in a step with a draft",
    },
    "conversations": {
        "loop_ms_turn": "milliseconds of the service's event loop for a turn, 10,000 conversations at once",
        "service_ms_turn": "milliseconds of its processor for a turn, scripted engines included",
        "environments_ms_turn": "milliseconds of the environments' processes for a turn",
        "kib_conversation": "KiB of the service for a conversation",
        "agent_begin_ms": "milliseconds from the begin of an agent's rollout to its first line, at most 10",
        "agent_mib": "MiB that its process has for itself before the agent does anything, at most 3",
        "delay_p50": "seconds that a turn takes beyond the engine's time, the median",
        "delay_p99": "the same of the slowest turn in a hundred",
    },
    "control_plane": {
        "ms_per_group_1024": "milliseconds of the service's processor for a group of 16 x 256 tokens, 1,024 engines",
        "gib_1024": "GiB of the service with 4,096 such groups and these engines",
        "idle_1024": "seconds of its processor time a second while nothing is asked, 1,024 engines",
        "publish_seconds_1024": "seconds of a publish of no bytes to 1,024 engines",
        "publish_hosts_seconds_1024": "the same to 1,024 engines on 128 other hosts",
        "publish_hosts_cpu_1024": "seconds of the service's processor in that publish",
        "start_hosts_seconds_1024": "seconds until 1,024 engines on 128 other hosts are up, all started at once",
    },
    "dynamic_sampling": {
        "ahead_vs_none_wide": "time to sample an iteration, half of the groups without a signal / none sampled ahead",
        "ahead_vs_batches_wide": "the same / whole batches until there are enough",
        "begun_vs_needed_wide": "groups begun / begun if none is sampled ahead",
        "ahead_vs_none_narrow": "the first one on an engine of a quarter of an iteration's groups at once",
        "ahead_vs_batches_narrow": "the second one on that engine",
        "begun_vs_needed_narrow": "the third one on that engine",
    },
    "tails": {
        "truncate_vs_stop": "time to sample an iteration, its last groups cut off / all waited for",
        "carry_vs_stop": "the same, its last groups put off / the same",
        "by_one_vs_stop": "the same, put off to the next iteration only / the same",
        "partial_vs_stop": "the same, engines that never wait, off-policy / the same",
        "truncate_length": "mean length of trained responses / of all, cut off",
        "carry_length": "the same, put off",
        "by_one_length": "the same, put off to the next iteration only",
        "partial_length": "the same, engines that never wait",
    },
    "in_flight": {
        "over_ideal_half": "an iteration of one wave / the longer of generation and training, training takes half",
        "over_ideal_one": "the same, both take equally long",
        "over_ideal_double": "the same, training takes twice as long",
        "at_once_over_ideal_half": "the first of these if all responses are sampled at once",
        "at_once_over_ideal_one": "the second of these",
        "at_once_over_ideal_double": "the third of these",
        "bound_over_ideal_half": "a time that no order of groups can be below / the ideal of the first of these",
        "bound_over_ideal_one": "the same, the second",
        "bound_over_ideal_double": "the same, the third",
        "over_bound_worst": "one of these iterations / that time, at worst",
        "chosen_vs_best_fixed_worst": "an iteration with chosen numbers in flight / with the best fixed one, at worst",
        "trying_vs_first_worst": "the longest iteration with chosen numbers / the first, at worst",
    },
    "overlap": {
        "ratio_balanced": "a periodic iteration / a synchronous one where generation and training take equally long",
        "efficiency_balanced": "the longer of generation and training / that periodic iteration",
        "gen_kept": "generation's speed beside training / alone",
        "loop_overhead": "share of a synchronous iteration that is neither publish, generation nor training",
        "load_balanced": "generation / training, as measured at the balanced load",
        "ratio_gen_half": "periodic / synchronous where generation takes half as long as training",
        "ratio_gen_double": "periodic / synchronous where it takes twice as long",
        "ratio_over_ideal_worst": "periodic / synchronous over the longer part / both, at the worst of the loads",
    },
    "contention": {
        "vllm_kept_balanced": "vLLM's own speed beside a run's steps / alone, at the balanced load",
        "steps_kept_balanced": "the run's steps a second beside vLLM / alone",
        "vllm_kept_plain_balanced": "vLLM's own speed beside a plain loop that trains / alone",
        "vllm_kept_gen_double": "as the first, where generation is the longer part",
        "steps_kept_gen_double": "as the second, where generation is the longer part",
        "vllm_kept_plain_gen_double": "as the third, where generation is the longer part",
        "vllm_kept_cached": "vLLM's own speed beside products of matrices that stay in the other core's cache / alone",
    },
    "trace": {
        "trace_overhead": "an iteration with a trace / one without, waits for groups left out, less 1",
        "trace_share": "the share of an iteration that a rank spends in recording",
        "ledger_coverage": "the least share of a process's time that has a cause",
        "ledger_vs_sampler": "time that a rank waits, by its ledger and by samples of its state: the difference",
        "engine_vs_main_thread": "the same of a vLLM engine, by samples of its main thread",
        "engine_vs_sampler": "the same, by samples of all of its threads",
    },
    "trl": {
        "vs_trl_tiny": "samples a second of a run / of TRL at its best, 0.2 M parameters",
        "vs_trl_10m": "the same / the same, 10 M parameters, prompts of 1,024",
        "vs_trl_40m": "the same / the same, 40 M parameters",
        "default_vs_pinned": "a run as it is / with engine and trainer on a core each",
        "vs_colocated_40m": "a run / a synchronous one where all cores sample and then all train, 40 M parameters",
    },
    "step": {
        "step_vs_peak_10m": "operations a second of a training step / of one large product, 10 M parameters",
        "step_vs_peak_40m": "the same / the same, 40 M parameters",
    },
    "step_ledger": {
        "error_worst": "error of the predicted time of a step, at worst, of the code that was measured on an H200",
        "launches_layer": "launches of a layer, forward and backward",
        "bytes_vs_before": "bytes that a layer moves for a row / those of the code that was measured",
        "predicted_vs_before_small": "predicted tokens a second / those of that code, 0.6 B, 16/512/8",
        "predicted_vs_before_0_6b": "the same / the same, 0.6 B, 512/1024/8",
        "predicted_vs_before_4b": "the same / the same, 4 B, 2048/1024/8",
    },
    "trimodel": {
        "fused_vs_separate_pp2": "three roles in one pass of two stages / in passes of their own, groups at hand",
        "streamed_vs_separate_pp2": "the same while groups arrive",
        "fused_vs_sum_pp1": "one pass of one stage / the sum of those that it replaces",
        "logprob_peak_vs_logits": "memory of the output layer with log-probs / that of its logits",
    },
    "roles": {
        "teacher_sampled_vs_without": "a pass with a teacher of the policy's size that gives log-probs / without one",
        "teacher_top_64_vs_without": "the same, the divergence over the teacher's 64 likeliest tokens and the others",
        "teacher_reverse_vs_without": "the same, KL(policy, teacher) over the vocabulary",
        "teacher_jsd_vs_without": "the same, the divergence from the mixture",
        "server_vs_without": "seconds of a vLLM server that gives these log-probs of its responses / of the pass",
        "critic_vs_without": "a pass with a critic of the policy's size / without one",
        "head_vs_without": "the same, a critic that is a head on the policy",
    },
    "served": {
        "service_vs_run": "a client's forward_backward / the same groups in an update of a run, 40 M parameters",
    },
    "log_probs_memory": {
        "logprob_peak_vs_logits": "the same, in a process of its own",
        "logprob_vs_naive": "seconds of the output layer with log-probs / of its naive twin",
    },
    "lora_memory": {
        "adapters_vs_all": "memory of a rank that trains adapters of rank 32 / all weights, 0.6 B, with a KL term",
        "all_gib": "GiB of the rank that trains all weights",
        "adapters_gib": "GiB of the rank that trains adapters",
    },
    "lora_step": {
        "rank_8": "tokens a second of a training step of adapters of rank 8 / of all weights, 40 M parameters",
        "rank_32": "the same of rank 32",
        "rank_128": "the same of rank 128",
    },
    "precision": {
        "mean_float32": "mean difference of vLLM's log-probs from those of its weights, in float32",
        "mean_bfloat16": "the same in bfloat16",
        "mean_cache_fp8": "the same with keys and values in fp8",
        "mean_weights_fp8": "the same with weights and inputs of linear layers in fp8",
        "mean_both_fp8": "the same with both",
        "bounded_float32": "share of tokens that a weight of at most 2 cuts, in float32",
        "bounded_bfloat16": "the same in bfloat16",
        "bounded_cache_fp8": "the same with keys and values in fp8",
        "bounded_weights_fp8": "the same with weights and inputs of linear layers in fp8",
        "bounded_both_fp8": "the same with both",
    },
    "shared_prompt": {
        "speedup_512_64_8": "attention with duplicated prompts / shared, 8 responses of 64 after a prompt of 512",
        "speedup_2048_64_8": "the same after a prompt of 2,048",
        "linear_speedup_512_64_8": "a linear layer with duplicated prompts / shared, as the first",
        "speedup_mla_512_64_8": "the first one with heads of 192 and values of 128, as in multi-latent attention",
        "bound_mla_512_64_8": "its bound, the ratio of the pairs of tokens",
        "worst_of_grid": "the smallest speed-up of the grid",
        "step_speedup_512_64_8": "a training step with duplicated prompts / shared",
        "token_saving_error": "tokens saved, as measured, minus the formula's",
    },
    "shared_turns": {
        "step_last": "a step on four turns of which the last has eight versions, all before each copied / shared",
        "step_last_pp2": "the same on two pipeline stages",
        "step_each": "the same if two turns follow each turn but the last",
        "step_each_pp2": "the same on two pipeline stages",
        "saving_error": "largest difference between the saving of tokens and the formula's",
    },
}
# The names under which the packages are imported: wheels for a CPU have names of their own.
_PACKAGES = ("torch", "megatron", "vllm")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a benchmark; no figures if it failed."""

    name: str
    seconds: float
    figures: Mapping[str, float]
    code: int
    circumstances: str
    """Machine, commit, packages and day."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that they run")
    parser.add_argument("--record", action="store_true", help="record the outcomes even if names are given")
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"unknown: {', '.join(unknown)}; the names are {', '.join(BENCHMARKS)}")
    outcomes = [run(name, arguments.tiny) for name in arguments.names or BENCHMARKS]
    if not arguments.tiny and (arguments.record or not arguments.names):
        record(outcomes, ROOT / "benchmarks")
    if failed := [outcome.name for outcome in outcomes if outcome.code]:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(any(outcome.code for outcome in outcomes))


def run(name: str, is_tiny: bool) -> Outcome:
    """Run a benchmark in a process of its own, and show its output."""
    print(f"\n=== {name}", flush=True)
    begun, last = time.monotonic(), ""
    command = [sys.executable, "-u", "-m", f"benchmarks.{name}", *(["--tiny"] if is_tiny else [])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    code = process.returncode
    figures = {} if code else json.loads(last)
    return Outcome(name, time.monotonic() - begun, figures, code, describe_circumstances())


def record(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Replace the recorded outcomes of these, and write the page and its picture again."""
    path = folder / "results.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    known = {row["name"]: Outcome(**row) for row in rows} | {outcome.name: outcome for outcome in outcomes}
    known_now = [known[name] for name in BENCHMARKS if name in known]
    path.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in known_now], indent=2) + "\n")
    draw(known_now, folder / "results.svg")
    (folder / "RESULTS.md").write_text(describe(known_now, "results.svg"))
    print(f"recorded in {folder / 'RESULTS.md'}")


def describe(outcomes: Sequence[Outcome], picture: str) -> str:
    """Return the text of the page."""
    lines = [
        "# What the benchmarks found",
        "",
        "Written by `make bench`. Figures are medians; rivals take turns in one run.",
        "",
        f"![Ratios; below 1 is better where something is compared with its limit, above where with a rival]({picture})",
    ]
    for outcome in outcomes:
        lines += [
            "",
            f"## {outcome.name}",
            "",
            f"`make bench NAME={outcome.name}`, {outcome.seconds / 60:.1f} minutes on {outcome.circumstances}",
            "",
        ]
        if outcome.code:
            lines += [f"It failed: exit code {outcome.code}."]
            continue
        lines += ["| key | figure | |", "| --- | --- | --- |"]
        said = BENCHMARKS[outcome.name]
        lines += [f"| `{key}` | {figure:.4g} | {said.get(key, '')} |" for key, figure in outcome.figures.items()]
    return "\n".join(lines) + "\n"


def describe_circumstances() -> str:
    return f"{describe_machine()}; {describe_packages()}; commit {find_commit()}, {datetime.date.today():%d %B %Y}"


def describe_machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":", 1)[1].strip() if names else "an unknown CPU"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def describe_packages() -> str:
    found = importlib.metadata.packages_distributions()
    names = [found[package][0] for package in _PACKAGES]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def find_commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}"


def draw(outcomes: Sequence[Outcome], out: Path) -> None:
    """Draw every ratio as a bar, on one logarithmic axis."""
    from matplotlib.figure import Figure

    rows = [
        (f"{outcome.name}: {BENCHMARKS[outcome.name].get(key, key)}", figure)
        for outcome in outcomes
        for key, figure in outcome.figures.items()
        if " / " in BENCHMARKS[outcome.name].get(key, "") and figure > 0
    ]
    figure = Figure(figsize=(11, 1 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names, values = [name for name, _ in rows], [value for _, value in rows]
    bars = axes.barh(names, [math.log2(value) for value in values])
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{2**value:g}")
    figure.savefig(out)


if __name__ == "__main__":
    sys.exit(main())
