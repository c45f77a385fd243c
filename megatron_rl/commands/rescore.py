"""The check that engines sampled with the weights that they reported: log-probs of responses are computed again.

The weights of a version are the checkpoint of its iteration, in Hugging Face's format. Its fingerprint must be the
published one in the log. In float32, transformers computes the log-probs at the sampling temperature.

A step of training may change log-probs by less than an engine's rounding. So an engine's responses are also compared,
all together, with the previous version. They are nearer to that version if the engine had old weights, but rounding
does not bring them nearer.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.turns import list_parts, mask_sampled, trace_path
from megatron_rl.shared.protocol.wire import decode_log_probs, decode_tokens
from megatron_rl.shared.records.audit_chain import Breach, BreachName
from megatron_rl.shared.records.audit_samples import KeptSamples, Sample, choose_samples
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import read_fingerprint
from megatron_rl.shared.weights.mapping import Mapping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The most that engines and transformers may differ by rounding, by the precision of the engines.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2, "float64": 1e-3}
# An engine's responses are judged nearer to the previous version only if they are at least _LEAST_RESPONSES, and nearer
# by more than _STANDARD_ERRORS.
_LEAST_RESPONSES = 8
_STANDARD_ERRORS = 8.0


@dataclasses.dataclass(frozen=True)
class Rescored:
    """The responses of a version that were computed again."""

    version: int
    num_responses: int
    num_tokens: int
    worst: float
    mean: float
    bound: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The versions of a run that were computed again, the reasons why others were not, and the breaches."""

    versions: list[Rescored]
    reasons: dict[int, str]
    breaches: list[Breach]


def rescore(
    kept: KeptSamples,
    checkpoints: Path,
    count: int,
    seed: str,
    bound: float | None = None,
    guest: str | None = None,
) -> Outcome:
    """Compute `count` responses again, spread over the versions that have a checkpoint; `seed` chooses them.

    `guest` is the family of the run's model as FILE.py:NAME, if this package does not have it.
    """
    reasons, breaches = dict(kept.reasons), list(kept.breaches)
    folders: dict[int, Path] = {}
    for version in kept.samples:
        folder = _find_folder(checkpoints, version)
        try:
            held = _read_fingerprint(folder, guest)
        except InputError as error:
            reasons[version] = str(error) if folder.exists() else f"the checkpoint {folder} does not exist"
            continue
        if held == kept.fingerprints[version]:
            folders[version] = folder
        else:
            reasons[version] = f"{folder} holds other weights"
            breaches.append(_other_checkpoint(kept, version, folder, held))
    chosen = choose_samples({version: kept.samples[version] for version in folders}, count, seed)
    results = []
    for version, folder in folders.items():
        samples = [sample for sample in chosen if sample.version == version]
        if samples:
            allowed = BOUNDS[read_architecture(folder, guest).dtype] if bound is None else bound
            result, found = _compare(folder, samples, allowed, _before(kept, checkpoints, version, guest))
            results.append(result)
            breaches += found
        else:
            reasons[version] = f"{count} responses are fewer than the versions; ask for more"
    return Outcome(results, dict(sorted(reasons.items())), breaches)


def log_probs(model: "PreTrainedModel", prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
    """Compute log-probs of a response's tokens, from the model's logits divided by the temperature."""
    tokens_T = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        logits_TV = model(tokens_T[None], logits_to_keep=len(response) + 1, use_cache=False).logits[0, :-1]
    logits_TV = logits_TV.float() / temperature
    chosen_T = logits_TV.gather(1, tokens_T[len(prompt) :, None])[:, 0]
    return (chosen_T - logits_TV.logsumexp(-1)).numpy()


def _read_fingerprint(folder: Path, guest: str | None = None) -> str:
    """Compute the fingerprint that the weights in a folder would be published with."""
    return read_fingerprint(folder, Mapping(read_architecture(folder, guest)))


def _find_folder(checkpoints: Path, version: int) -> Path:
    return checkpoints / f"iter_{version:07d}"


def _before(kept: KeptSamples, checkpoints: Path, version: int, guest: str | None) -> Path | None:
    """Find the checkpoint of the previous version, if it exists and has another policy."""
    folder, published = _find_folder(checkpoints, version - 1), kept.fingerprints.get(version - 1)
    try:
        held = _read_fingerprint(folder, guest)
    except InputError:
        return None
    return folder if held == published != kept.fingerprints[version] else None


def _other_checkpoint(kept: KeptSamples, version: int, folder: Path, held: str) -> Breach:
    published = kept.fingerprints[version]
    return Breach(
        BreachName.OTHER_CHECKPOINT,
        min(sample.line for sample in kept.samples[version]),
        f"{folder} has fingerprint {held[:12]}, and version {version} was published with {published[:12]}",
    )


def _compare(
    folder: Path, samples: Sequence[Sample], bound: float, before: Path | None
) -> tuple[Rescored, list[Breach]]:
    differences = _all_differences(folder, samples)
    breaches = list(_breaches(samples, differences, bound))
    if before is not None and not breaches:
        breaches += _nearer(samples, differences, _all_differences(before, samples))
    everything = np.concatenate(differences)
    rescored = Rescored(
        version=samples[0].version,
        num_responses=len(samples),
        num_tokens=len(everything),
        worst=float(everything.max()),
        mean=float(everything.mean()),
        bound=bound,
    )
    return rescored, breaches


def _all_differences(folder: Path, samples: Sequence[Sample]) -> list[np.ndarray]:
    # Imported here: it takes seconds, and no other module of the package computes with it.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_differences(model, sample) for sample in samples]


def _differences(model: "PreTrainedModel", sample: Sample) -> np.ndarray:
    """Compute the difference of each token; it is infinite if the engine's report cannot come from this model."""
    prompt, response = decode_tokens(sample.prompt_tokens), decode_tokens(sample.response.tokens)
    reported = decode_log_probs(sample.response.log_probs)
    everything = np.concatenate([prompt, response])
    if len(reported) != len(response) or everything.min() < 0 or everything.max() >= model.config.vocab_size:
        return np.full(len(response), math.inf)
    whole = lambda begin, end: everything[len(prompt) + begin : len(prompt) + end]  # noqa: E731
    parts, found = list_parts(sample.response), []
    for number, part in enumerate(parts):
        path = trace_path(parts, number, len(prompt))
        before = np.concatenate([everything[:0], *(whole(begin, end) for begin, end in path)])
        found.append(log_probs(model, before, whole(part.start, part.end), sample.temperature))
    return np.abs(np.concatenate(found) - reported)[mask_sampled(sample.response)]


def _breaches(samples: Sequence[Sample], differences: Sequence[np.ndarray], bound: float) -> Iterator[Breach]:
    for sample, difference in zip(samples, differences, strict=True):
        # Written so that NaN is never within the bound.
        if not difference.max() <= bound:
            worst = int(difference.argmax())
            yield Breach(
                BreachName.OTHER_LOG_PROBS,
                sample.line,
                f"{sample}: token {worst} is {difference[worst]:.3g} off, beyond {bound:g}; {difference.mean():.3g} on "
                f"average over {len(difference)} tokens",
            )


def _nearer(
    samples: Sequence[Sample], differences: Sequence[np.ndarray], before: Sequence[np.ndarray]
) -> Iterator[Breach]:
    """Find engines whose responses, taken together, are nearer to the previous version than to the one they claim."""
    for engine in sorted({sample.response.engine for sample in samples}):
        mine = [number for number, sample in enumerate(samples) if sample.response.engine == engine]
        # Tokens of a response are not independent of one another, so responses are counted.
        to_claimed_R = np.array([differences[number].mean() for number in mine])
        to_before_R = np.array([before[number].mean() for number in mine])
        excess_R = to_claimed_R - to_before_R
        if len(mine) < _LEAST_RESPONSES or not np.isfinite(excess_R).all():
            continue
        if excess_R.mean() > _STANDARD_ERRORS * excess_R.std(ddof=1) / math.sqrt(len(mine)):
            sample = samples[mine[0]]
            yield Breach(
                BreachName.OTHER_LOG_PROBS,
                sample.line,
                f"{len(mine)} responses of version {sample.version} (engine {engine}) are nearer to version "
                f"{sample.version - 1}, {to_before_R.mean():.3g} off on average, than to their own, "
                f"{to_claimed_R.mean():.3g} off",
            )
