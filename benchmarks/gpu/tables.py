"""The tables of `make gpu-bench`: their columns, and the rows that parts add to them as they measure."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of the page."""

    title: str
    names: str
    """The meaning of a row's name."""
    figures: Mapping[str, str]
    """The columns, with their meanings; a meaning with " / " in it is a ratio, which the picture shows."""

    @property
    def ratios(self) -> Mapping[str, str]:
        return {key: meaning for key, meaning in self.figures.items() if " / " in meaning}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row, without figures if it could not be measured."""

    table: str
    name: str
    figures: Mapping[str, float]
    note: str = ""


TABLES: Mapping[str, Table] = {
    "rival": Table(
        "Whole iterations beside TRL",
        "model, prompts x responses, prompt/response",
        {
            "ours": "s of a periodic iteration, from its publish to its update",
            "theirs": "s of one of TRL's GRPOTrainer, with vLLM colocated and Liger's kernels where installed",
            "tokens": "response tokens a second",
            "their_tokens": "the same of TRL",
            "gib": "GiB of the GPU that are held after the first iteration, engine included",
            "their_gib": "the same of TRL",
            "vs_trl": "ours / TRL, tokens a second",
        },
    ),
    "attention": Table(
        "Shared-prompt attention",
        "prompt/response/responses, 32 heads and 8 of keys, 128 columns each, bf16",
        {
            "floor": "ms that the products must take, forward and backward",
            "whole": "ms of whole sequences, by the fastest of torch",
            "shared": "ms of shared prompts, by the fastest backend",
            "speedup": "whole sequences / shared prompts",
            "over_floor": "shared prompts / floor",
        },
    ),
    "output_layer": Table(
        "Output layer with log-probs",
        "targets x vocabulary x hidden size, bf16, forward and backward",
        {
            "ours": "ms",
            "naive": "ms of torch's softmax over all logits",
            "speedup": "all logits / ours, time",
            "gib": "GiB at the peak, above what is given",
            "naive_gib": "the same with all logits",
        },
    ),
    "kernels": Table(
        "Kernels beside attention",
        "what is computed, in bf16; Adam in fp32",
        {
            "ours": "ms, forward and backward",
            "plain": "ms of torch's plain operations",
            "speedup": "plain operations / ours, time",
            "gbps": "GB a second of ours: each tensor counts once",
            "copy_gbps": "GB a second of a copy that moves the same number of bytes",
            "over_copy": "ours / that copy, time",
        },
    ),
    "launches": Table(
        "Launches of Triton kernels",
        "kernel; the host's time for a launch",
        {
            "first": "ms of the first one, for which the kernel is compiled or found in Triton's cache",
            "cold": "us of a later one through Triton",
            "kept": "us of one through the kept kernel, as training does it",
            "operator": "us of an addition by torch",
            "speedup": "through Triton / kept, time",
        },
    ),
    "step": Table(
        "Training step",
        "model, prompt/response/responses x groups, groups a micro-batch",
        {
            "ours": "response tokens a second",
            "tflops": "10^12 operations a second, those that must be computed",
            "gib": "GiB at the peak",
            "theirs": "response tokens a second of transformers with sdpa, at its best micro-batch",
            "vs_transformers": "ours / transformers, tokens a second",
        },
    ),
    "publish": Table(
        "Publish",
        "model, weights in bf16, to one engine on the same GPU",
        {
            "seconds": "s in all",
            "announce": "s until the sidecar is told, fingerprint included",
            "pause": "s until the engine stands still",
            "load": "s until it has loaded the weights",
            "commit": "s of its tag and its cache, and until it has said what it holds",
            "probe": "s of the engine's probe",
            "open": "s until it samples again",
            "other": "s of none of these, waiting for the trainer's probe among them",
            "gbps": "GB a second",
        },
    ),
    "generation": Table(
        "Generation",
        "responses x tokens, all in flight at once",
        {
            "service": "tokens a second through the rollout service",
            "alone": "tokens a second of vLLM's own LLM.generate: the same prompts and sampling",
            "service_vs_alone": "the service / vLLM alone, tokens a second",
        },
    ),
    "schedules": Table(
        "Periodic and synchronous iterations",
        "load, prompts x responses, prompt length",
        {
            "balance": "generation over training, as measured in synchronous iterations",
            "sync": "s of a synchronous iteration",
            "periodic": "s of a periodic one of the same number of tokens",
            "ratio": "periodic / synchronous",
            "over_ideal": "the same / the longer of generation and training over both",
        },
    ),
    "start": Table("Start of a run", "what is said at that moment", {"at": "s since the start"}),
}


def append_row(path: Path, row: Row) -> None:
    """Write a row down at once: a process that is ended later loses none."""
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def read_rows(path: Path) -> Sequence[Row]:
    """Read the rows that a part has written; none if it has not written any."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
