"""`megatron-rl audit RUN`: check the audit log of a run and list every breach.

megatron-rl audit RUN

RUN is the log, the folder that has audit.jsonl, the folder above, or the folder of --save.

megatron-rl audit RUN --head HASH

This checks also that the line with this hash, which was noted elsewhere, still exists.

megatron-rl audit RUN --rescore N --checkpoints FOLDER

This checks also that the log-probs of N responses are those of the weights of their versions. Their checkpoints are
FOLDER/iter_0000012 and so on.

The exit code is 0 without a breach, else 5.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.errors import ExitCode, InputError, UsageError, count_noun
from megatron_rl.observe.run_folder import find_run
from megatron_rl.shared.records.audit_chain import Breach, BreachName
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import FILE_NAME, find_files, find_first_file, read_log_lines
from megatron_rl.shared.records.audit_report import Report, describe_weaker_proof
from megatron_rl.shared.records.audit_samples import read_kept

if TYPE_CHECKING:
    from megatron_rl.commands.rescore import Outcome

SEQUENCES = "sequences.bin"
"""The file with what clients of a service have sampled."""


def main(argv: list[str]) -> int:
    """Print a summary of the log and every breach."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the log, its folder, or the folder of --save")
    parser.add_argument(
        "--head", action="append", default=[], help="the hash of a line that must exist; may be given several times"
    )
    parser.add_argument("--rescore", type=int, metavar="N", help="compute the log-probs of N responses again")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="the folder of --save-hf, by iteration")
    parser.add_argument(
        "--rescore-bound",
        type=float,
        metavar="X",
        help="most error of a log-prob; by default 1e-3 for float32 weights, 5e-2 for bfloat16 and float16",
    )
    parser.add_argument("--weights-bridge", metavar="FILE.py:NAME", help="the run's own model family")
    arguments = parser.parse_args(argv)
    _check(arguments)
    arguments.run = find_run(arguments.run, FILE_NAME)
    report = verify(arguments.run, arguments.head)
    _print(report)
    breaches = report.breaches
    if (arguments.run / SEQUENCES).exists():
        breaches = [*breaches, *_check_served(arguments.run)]
    if arguments.rescore is not None:
        breaches = [*breaches, *_rescore(arguments, report)]
    return ExitCode.RUN if breaches else ExitCode.OK


def _check(arguments: argparse.Namespace) -> None:
    number, folder, bound = arguments.rescore, arguments.checkpoints, arguments.rescore_bound
    if number is None:
        if folder is not None or bound is not None or arguments.weights_bridge is not None:
            raise UsageError(
                "--checkpoints, --rescore-bound and --weights-bridge need --rescore N: write it, or drop them"
            )
        return
    if number < 1:
        raise UsageError(f"--rescore {number} must be at least 1")
    if folder is None:
        raise UsageError("--checkpoints is missing: name the folder that --save-hf wrote checkpoints into")
    if not folder.is_dir():
        raise InputError(f"--checkpoints {folder} must be a folder: name the one that --save-hf wrote checkpoints into")
    if bound is not None and not 0 < bound < math.inf:
        raise UsageError(f"--rescore-bound {bound:g} must be finite and above 0")


def _check_served(folder: Path) -> list[Breach]:
    """Check that the sequences of a service's clients are from versions that their engines had proved to hold."""
    # It imports torch, as the file of a service does when it is checked for a client.
    from megatron_rl.tinker.provenance import read_sequences

    proved = set()
    for path in find_files(find_first_file(folder)).values():
        for line in read_log_lines(path):
            event = json.loads(line)
            if event["event"] == "publish":
                proved |= {(one["version"], one["fingerprint"], one["engine"]) for one in event["engines"]}
    sequences, _ = read_sequences(folder)
    found = [one for one in sequences if (one.version, one.fingerprint, one.engine) not in proved]
    for one in found:
        print(f"BREACH {SEQUENCES}: {one.identity} of version {one.version}: {one.engine} had not proved to hold it")
    print(f"{count_noun(len(sequences), 'sequence')} of clients, {len(sequences) - len(found)} from proved weights")
    return [Breach(BreachName.NOT_PUBLISHED, 0, f"{SEQUENCES}: {one.identity}") for one in found]


def _rescore(arguments: argparse.Namespace, report: Report) -> list[Breach]:
    if arguments.rescore_bound is None and report.proofs.quantizations:
        names = "; ".join(report.proofs.quantizations)
        raise UsageError(
            f"the engines of {arguments.run} quantize ({names}), so their log-probs are not the weights' own: "
            "write --rescore-bound, the most that one may be off (`mismatch.max` in the metrics)"
        )
    # Imported here: torch and transformers take seconds, and checking the log does not need them.
    from megatron_rl.commands.rescore import rescore

    # While responses are sampled, the head of the finished log is unknown, and so is the choice of responses.
    outcome = rescore(
        read_kept(arguments.run),
        arguments.checkpoints,
        arguments.rescore,
        report.head,
        arguments.rescore_bound,
        arguments.weights_bridge,
    )
    _print_outcome(report, outcome)
    if not outcome.versions and not outcome.breaches and not report.breaches:
        raise InputError(
            f"no response of {arguments.run} could be computed again, for the reasons above: write checkpoints of "
            f"versions whose journals are kept, with --save-hf, --save-interval and --rollout-retain-journals"
        )
    return outcome.breaches


def _print(report: Report) -> None:
    starts = count_noun(report.num_starts, "start")
    print(f"run {report.run}: {report.num_lines} lines, {starts}, {report.num_recovered} recovered")
    print(
        f"{'version':>8} {'fingerprint':<12} {'outcome':<10} {'groups':>7} {'responses':>9} {'tokens':>10} "
        f"{'compared':>12}  engines"
    )
    for item in report.iterations:
        compared = "-" if item.compared is None else "{}/{}".format(*item.compared)
        restored = f"  ({item.num_restored} groups from the journal)" if item.num_restored else ""
        print(
            f"{item.version:>8} {item.fingerprint[:12]:<12} {item.outcome:<10} {item.num_groups:>7} "
            f"{item.num_responses:>9} {item.num_tokens:>10} {compared:>12}  {', '.join(sorted(item.engines))}{restored}"
        )
    for evaluation in report.evaluations:
        mean = "none scored" if evaluation.mean_reward is None else f"mean reward {evaluation.mean_reward:.4f}"
        print(
            f"{evaluation.version:>8} {evaluation.fingerprint[:12]:<12} evaluation: {evaluation.num_prompts} prompts, "
            f"{evaluation.num_responses} responses, {mean}"
        )
    for change in report.changes:
        print(f"{change.version:>8} was trained with another objective: {', '.join(change.changes)}")
    for name, source in report.count_sources().items():
        print(
            f"source {name}: {source.num_groups} groups, {source.num_responses} responses, mean reward "
            f"{source.reward / max(source.num_responses, 1):.4f}"
        )
    for told, counts in zip(("were not trained on", "were sampled again"), report.count_failures(), strict=True):
        if counts:
            causes = ", ".join(f"{cause} {count}" for cause, count in counts.most_common())
            print(f"{count_noun(counts.total(), 'response')} {told}: {causes}")
    proofs = report.proofs
    print(
        f"{proofs.num_reports} reports of engines: {proofs.num_whole} compared bit for bit with what was received, "
        f"{proofs.num_probed} with the trainer's log-probs (at most {proofs.furthest:.3g} apart on average)"
    )
    for base in proofs.bases:
        print(f"engines got adapters alone and hold the base {base[:12]}; fingerprints cover both")
    for name, count in proofs.quantizations.items():
        print(f"engines quantize ({name}): in {count} of {proofs.num_reports} reports")
    if proofs.num_weaker:
        print(describe_weaker_proof(proofs))
    _print_put_off(report)
    _print_breaches(report, report.breaches)
    num_complete = sum(item.outcome == "complete" for item in report.iterations)
    print(f"{num_complete} of {len(report.iterations)} iterations complete, {_count_breaches(report.breaches)}")
    print(f"head {report.head}")
    if report.num_covered:
        print(f"lines 1 to {report.num_covered} are unchanged since the head was kept")


def _print_put_off(report: Report) -> None:
    """Print the prompts that were submitted but not trained on by the end of the log."""
    if report.put_off is None:
        print("which prompts are put off is unknown: the log does not begin with version 0")
    if not report.put_off:
        return
    num_responses = sum(one.num_responses for one in report.put_off)
    print(
        f"{len(report.put_off)} prompts ({num_responses} responses) are put off and not trained on when the log ends:"
    )
    for one in report.put_off:
        print(f"  prompt {one.prompt} of version {one.version}, tokens {one.tokens}")


def _print_outcome(report: Report, outcome: "Outcome") -> None:
    print("log-probs computed again, and their distance from those that engines reported:")
    print(f"{'version':>8} {'responses':>9} {'tokens':>10} {'worst':>10} {'mean':>10} {'bound':>10}")
    for item in outcome.versions:
        print(
            f"{item.version:>8} {item.num_responses:>9} {item.num_tokens:>10} {item.worst:>10.3g} {item.mean:>10.3g} "
            f"{item.bound:>10.3g}"
        )
    for version, reason in outcome.reasons.items():
        print(f"{version:>8} not computed again: {reason}")
    _print_breaches(report, outcome.breaches)
    num_responses = count_noun(sum(item.num_responses for item in outcome.versions), "response")
    num_versions = count_noun(len(outcome.versions), "version")
    print(f"{num_responses} of {num_versions} computed again, {_count_breaches(outcome.breaches)}")


def _count_breaches(breaches: list[Breach]) -> str:
    return count_noun(len(breaches), "breach", "breaches")


def _print_breaches(report: Report, breaches: list[Breach]) -> None:
    for breach in breaches:
        print(f"BREACH {report.place(breach.line)}: {breach.name}: {breach.detail}")
