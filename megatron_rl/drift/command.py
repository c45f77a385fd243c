"""`megatron-rl drift RUN`: find where the log-probs of a run's engines and trainer differ from exact ones, and why.

megatron-rl drift RUN

An engine is started as the run's engines were, with the weights that the run began with. It answers prompts of the run
again while its parts are recorded. Then the trainer's model computes the same tokens. Each part is compared with its
definition in float64.

megatron-rl drift RUN --checkpoint FOLDER

The same with the weights of a checkpoint in Hugging Face's format, such as one of --save-hf.

The exit code is 0 if every part is right but for rounding, else 5.
"""

import argparse
import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from megatron_rl.drift.definition import Definition
from megatron_rl.drift.diagnosis import Diagnosis, Examiner, Recorded, measure_difference
from megatron_rl.drift.trainer import compute
from megatron_rl.errors import ExitCode, InputError, UsageError
from megatron_rl.observe import run_folder
from megatron_rl.observe.run_folder import CONFIG_FILE, SavedConfig, find_run, read_saved_config
from megatron_rl.shared.protocol.wire import Sampling, decode_log_probs, decode_tokens
from megatron_rl.shared.records.audit_log import FILE_NAME
from megatron_rl.shared.records.audit_samples import Sample, choose_samples, read_kept
from megatron_rl.shared.records.model_parts import Recording, join_ranks
from megatron_rl.sidecar.child import MESSAGE_FILE
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.settings import MESSAGE_FLAG, SidecarSettings, read_settings
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.flags import FLAGS_OF_DRAFTS, drop_flags
from megatron_rl.sidecar.vllm.server import ServerConfig, configure_server
from megatron_rl.sidecar.vllm.watching import EXTENSION

# A prompt's first blocks would not be computed if an earlier one had them, and with steps that are scheduled ahead, a
# token is computed after the one that ends a response.
FLAGS = ("--worker-extension-cls", EXTENSION, "--no-enable-prefix-caching", "--no-async-scheduling")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder, or the folder of --save")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="weights; those of the start if not given")
    parser.add_argument("--responses", type=int, default=8, metavar="N", help="responses to record; 8 if not given")
    arguments = parser.parse_args(argv)
    if arguments.responses < 1:
        raise UsageError(f"--responses {arguments.responses} must be at least 1")
    run = find_run(arguments.run, FILE_NAME)
    settings = read_settings([MESSAGE_FLAG, str(run / MESSAGE_FILE)])
    folder = arguments.checkpoint or settings.hf_model
    if settings.rollout.engine != "vllm" or folder is None:
        raise InputError(f"{run} has engines that draw tokens at random: name a run with vLLM")
    if not folder.is_dir():
        raise InputError(f"--checkpoint {folder} must be a folder: name a checkpoint in Hugging Face's format")
    samples = choose_samples(read_kept(run).samples, arguments.responses, "drift")
    if not samples:
        raise InputError(f"{run} keeps no responses: --rollout-retain-journals keeps those of more iterations")
    findings = examine(settings, folder, samples, read_saved_config(run / CONFIG_FILE))
    run_folder.write_findings(run, findings)
    return ExitCode.RUN if any(side.causes for side in findings.sides) else ExitCode.OK


def examine(
    settings: SidecarSettings, folder: Path, samples: Sequence[Sample], config: SavedConfig | None
) -> run_folder.DriftFindings:
    """Have an engine answer the samples' prompts again, then the trainer compute the answers; print what is found."""
    # Loaded first: a model that drift does not know is refused before an engine is started.
    server = configure(settings, folder)
    dtype = getattr(torch, server.dtype)
    truth = Definition(folder, torch.float64, weights_dtype=dtype)
    sampled = asyncio.run(record(server, samples))
    of_engine = Examiner(truth, Definition(folder, dtype), server.tensor_parallel_size).diagnose(sampled)
    _print(f"{of_engine.num_tokens} tokens were sampled again by an engine in {_name(dtype)}", of_engine)
    findings = run_folder.DriftFindings(
        checkpoint=str(folder), num_tokens=of_engine.num_tokens, sides=[_sum_up("engine", of_engine)]
    )
    if config is None or not config.words:
        print("the trainer's model is that of a recipe's script, which is not computed here")
        return findings
    computed = compute(config, folder, sampled)
    if computed.dtype != dtype:
        truth = Definition(folder, torch.float64, weights_dtype=computed.dtype)
    of_trainer = Examiner(truth, Definition(folder, computed.dtype), computed.num_ranks).diagnose(computed.responses)
    _print(f"the trainer computed the same tokens in {_name(computed.dtype)}", of_trainer)
    difference = measure_difference(of_engine.log_probs, of_trainer.log_probs)
    print(f"engine and trainer are {difference:.3g} from each other on average")
    if computed.dtype != dtype:
        of_weights = measure_difference(of_engine.exact, of_trainer.exact)
        print(f"of it, {of_weights:.3g} is between weights in {_name(dtype)} and in {_name(computed.dtype)}")
    return msgspec.structs.replace(
        findings, sides=[*findings.sides, _sum_up("trainer", of_trainer)], difference=difference
    )


def configure(settings: SidecarSettings, folder: Path) -> ServerConfig:
    """Configure an engine as the run's are, but for compilation, which leaves no parts to watch, and for drafts.

    Drafted tokens that are not accepted would leave rows.
    """
    rollout = dataclasses.replace(settings.rollout, speculative=None, speculative_tokens=None)
    num_threads = rollout.num_threads or 1
    config = configure_server(
        rollout, folder, settings.seq_length, settings.device, num_threads, None, settings.weights_bridge
    )
    own = drop_flags(config.flags, *FLAGS_OF_DRAFTS)
    return dataclasses.replace(config, eager=True, flags=(*own, *FLAGS))


async def record(config: ServerConfig, samples: Sequence[Sample]) -> list[Recorded]:
    """Record how an engine samples responses, one after another."""
    folder = make_socket_folder()
    recordings = Path(tempfile.mkdtemp(prefix="megatron-rl-drift-"))
    engine = VllmFactory(config, folder, LocalLauncher()).create("drift")
    try:
        await engine.start()
        found = []
        for number, sample in enumerate(samples):
            await engine.watch()
            prompt = decode_tokens(sample.prompt_tokens).tolist()
            most = len(sample.response.tokens) // 4
            sampling = Sampling(max_tokens=most, temperature=sample.temperature)
            request = GroupRequest(f"drift-{number}", tuple(prompt), 1, sample.response.seed, sampling)
            (response,) = await engine.answer(request)
            await engine.write_recording(recordings)
            ranks = [Recording.load(path) for path in sorted(recordings.glob("rank-*.safetensors"))]
            sampled = decode_tokens(response.tokens).tolist()
            recording = join_ranks(ranks).keep_response(len(prompt), len(sampled))
            log_probs = decode_log_probs(response.log_probs).tolist()
            found.append(Recorded([*prompt, *sampled], log_probs, sample.temperature, recording))
        return found
    finally:
        await engine.close()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(recordings, ignore_errors=True)


def describe(found: Diagnosis) -> Iterator[str]:
    """Yield the lines of a diagnosis."""
    yield f"log-probs are {found.difference:.3g} from exact ones on average; the parts that make this up:"
    rows = [("part", "effect", "error / bound", "")]
    for finding in found.findings:
        said = "" if finding.is_right else f"{finding.worst}: {finding.reason}"
        rows.append((finding.name, f"{finding.effect:.2g}", f"{finding.excess:.2g}", said))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, effect, excess, said in rows:
        yield f"{name:<{widths[0]}}  {effect:>{widths[1]}}  {excess:>{widths[2]}}  {said}".rstrip()
    if found.is_of_other_weights:
        yield "it computes with other weights than the checkpoint's: name the checkpoint of its version"
    elif found.causes:
        yield f"{len(found.causes)} of {len(found.findings)} parts are off by more than rounding"
    else:
        yield f"healthy: every part is within what rounding does in {_name(found.dtype)}"


def _print(title: str, found: Diagnosis) -> None:
    print(title)
    for line in describe(found):
        print(line)
    print(flush=True)


def _sum_up(name: str, found: Diagnosis) -> run_folder.Side:
    return run_folder.Side(
        name=name, dtype=_name(found.dtype), difference=found.difference, largest=found.findings[0].name,
        causes=[f"{cause.worst}: {cause.reason}" for cause in found.causes],
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
