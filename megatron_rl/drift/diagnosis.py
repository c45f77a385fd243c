"""Names the parts of an engine, or of the trainer, that differ from their definition by more than rounding, and why.

Every part is compared with its definition in float64 from the inputs that it had. It is right if it is as near as the
definition is in the same precision:

    |ours - truth|  <=  2 |definition - truth|  +  4 units in the last place of the truth's largest value

This is the rule of docs/numerics.md, with a smaller bound for tokens whose numbers are less than a fourth of the
largest: one token's large numbers hide no errors of others. In 16 bits the rule lets errors of 8-bit floats pass. So a
part is not right either if it is far less exact than the definition and its errors are those of computing in 8 bits.

Parts that are not right are the causes. The effect of a part is the change of the sampled tokens' log-probs if its
errors are added to an exact forward pass, all layers' at once.

To first order the effects add up to at least the difference of the log-probs. If the difference is far larger, or
tokens or positions are not the response's, something is wrong between the parts, such as the sums of their outputs.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_rl.drift.definition import FP8, Definition, score_tokens
from megatron_rl.shared.records.model_parts import JOINED, TEMPERATURE, LayerPart, ModelPart, Recording, Tensors

Errors = Mapping[LayerPart, Tensors]
"""For each point, the outputs of a recorded part less those of its definition from the same inputs."""

SAMPLER = "sampler"
BETWEEN = "between the parts"
# The most times its own largest value that a row's bound is measured by.
_OWN = 4.0
# The difference that parts do not make up, in sums of their effects. The rounding of sums between them is less.
_UNEXPLAINED = 3.0
# From the coarsest on.
_COARSER = (FP8, torch.bfloat16, torch.float16)
# The least correlation of errors that have one cause.
_ALIKE = 0.5
# The errors of 8-bit floats are some ten times those of 16 bits. Those below this many times are not looked at.
_FAR = 3.0
# The parts that have no weights.
_WITHOUT_WEIGHTS = frozenset((ModelPart.ROTATION, ModelPart.ATTENTION, ModelPart.ACTIVATION))
# Parts whose outputs are sums over tensor-parallel ranks.
_SUMMED = frozenset(
    (ModelPart.EMBEDDING, ModelPart.ATTENTION_OUTPUT, ModelPart.DOWN, ModelPart.EXPERTS, ModelPart.LOG_PROBS)
)
# The distance of two experts' scores at which rounding decides between them, in units of the scores' own error.
_NEAR_TIE = 8.0


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A response that an engine sampled, with a recording of the engine's parts or of the trainer's."""

    tokens: Sequence[int]
    """Those of the prompt, then those that were sampled."""
    log_probs: Sequence[float]
    """The log-probs of the sampled tokens, as the engine or the trainer reports them."""
    temperature: float
    recording: Recording


@dataclasses.dataclass
class PartFinding:
    """A part, over all layers and responses."""

    name: str
    excess: float = 0.0
    """The largest error over its bound: the part is not right above 1."""
    worst: str = ""
    """The point with this error."""
    effect: float = 0.0
    """The mean change of a log-prob by the part's errors."""
    reason: str = ""
    """The reason why it is not right, as far as it is known."""
    is_in_8_bits: bool = False
    """True if it computes in 8 bits at a point, and the errors are within what 16 bits allow."""
    coarser: list[torch.dtype] = dataclasses.field(default_factory=lambda: list(_COARSER))
    """The coarser precisions that it may have computed in at every point that is not right."""

    @property
    def is_right(self) -> bool:
        return self.excess <= 1 and not self.is_in_8_bits


@dataclasses.dataclass
class Diagnosis:
    """The findings about an engine or the trainer."""

    dtype: torch.dtype
    findings: list[PartFinding]
    """All parts, those with the largest effect first."""
    log_probs: torch.Tensor
    """Those of all sampled tokens, as they are reported."""
    exact: torch.Tensor
    """The same from a pass in float64, with weights in the precision of what is examined."""
    is_of_other_weights: bool = False

    @property
    def difference(self) -> float:
        """The mean difference of the reported log-probs from exact ones."""
        return measure_difference(self.log_probs, self.exact)

    @property
    def num_tokens(self) -> int:
        return len(self.log_probs)

    @property
    def causes(self) -> list[PartFinding]:
        """The parts that are not right."""
        return [finding for finding in self.findings if not finding.is_right]


def measure_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the mean difference between log-probs of the same tokens."""
    return float((ours - theirs).abs().mean())


@dataclasses.dataclass
class Examiner:
    """Examines what an engine or the trainer computed."""

    truth: Definition
    definition: Definition
    """In the precision of what is examined."""
    num_ranks: int = 1
    _coarse: dict[torch.dtype, list[Definition]] = dataclasses.field(default_factory=dict, init=False)

    def diagnose(self, responses: Sequence[Recorded]) -> Diagnosis:
        found: dict[str, PartFinding] = {}
        changes: dict[str, list[torch.Tensor]] = {}
        exact_log_probs = []
        for one in responses:
            errors = self._compare(one, found)
            exact = self._log_probs(one, {})
            exact_log_probs.append(exact)
            for part in dict.fromkeys(point.part for point in errors):
                of_part = {point: error for point, error in errors.items() if point.part is part}
                changes.setdefault(part, []).append((self._log_probs(one, of_part) - exact).abs())
            if LayerPart(ModelPart.LOGITS) in set(one.recording):
                changes.setdefault(SAMPLER, []).append(self._compare_sampler(one, found))
        for name, values in changes.items():
            found[name].effect = float(torch.cat(values).mean())
        reported = torch.tensor([value for one in responses for value in one.log_probs]).double()
        exact_log_probs_R = torch.cat(exact_log_probs)
        between = _compare_between(responses, measure_difference(reported, exact_log_probs_R), found.values())
        if not between.is_right:
            found[BETWEEN] = between
        findings = sorted(found.values(), key=lambda finding: -finding.effect)
        wrong = [finding for finding in findings if not finding.is_right]
        have_weights = [finding for finding in findings if _has_weights(finding)]
        # A part whose errors are those of a coarser precision may well have the weights.
        num_unlike = sum(not (finding.is_right or finding.coarser or finding.is_in_8_bits) for finding in have_weights)
        has_other_weights = num_unlike > len(have_weights) / 2
        for finding in wrong:
            finding.reason = finding.reason or self._explain(finding, has_other_weights)
        return Diagnosis(self.definition.dtype, findings, reported, exact_log_probs_R, has_other_weights)

    def _compare(self, one: Recorded, found: dict[str, PartFinding]) -> dict[LayerPart, Tensors]:
        """Compare each point with its definition; return the errors."""
        errors: dict[LayerPart, Tensors] = {}
        for point in one.recording:
            recorded = one.recording[point]
            if point.part is ModelPart.LOG_PROBS:
                recorded = {**recorded, TEMPERATURE: torch.tensor(one.temperature)}
            truth = self.truth.compute(point, recorded)
            theirs = self.definition.compute(point, recorded)
            kept = self._find_decided_rows(point, recorded)
            finding = found.setdefault(point.part, PartFinding(point.part))
            errors[point] = {name: recorded[name].double() - truth[name] for name in truth}
            excess = max(_measure_excess(recorded[name][kept], truth[name][kept], theirs[name][kept]) for name in truth)
            if excess > finding.excess:
                finding.excess, finding.worst = excess, str(point)
            errors_kept = {name: error[kept] for name, error in errors[point].items()}
            if excess <= 1 and self._is_in_8_bits(point, recorded, errors_kept, truth, theirs, kept):
                finding.is_in_8_bits = True
            if excess > 1:
                finding.coarser = [
                    dtype for dtype in finding.coarser if self._may_be_in(dtype, point, recorded, errors_kept, kept)
                ]
                if point.part is ModelPart.LOG_PROBS:
                    logits = self.truth.compute(LayerPart(ModelPart.LOGITS), recorded)["out"]
                    finding.reason = _explain_temperature(logits, one) or ""
        return errors

    def _is_in_8_bits(
        self,
        point: LayerPart,
        recorded: Tensors,
        errors: Tensors,
        truth: Tensors,
        theirs: Tensors,
        kept: torch.Tensor,
    ) -> bool:
        """Check whether errors are far larger than the definition's, and those of computing in 8-bit floats."""
        ours = torch.cat([errors[name].flatten() for name in errors])
        of_definition = torch.cat([(theirs[name].double() - truth[name])[kept].flatten() for name in errors])
        if self.definition.dtype == torch.float32 or not ours.norm() > _FAR * of_definition.norm():
            return False
        return self._may_be_in(FP8, point, recorded, errors, kept)

    def _may_be_in(
        self, dtype: torch.dtype, point: LayerPart, recorded: Tensors, errors: Tensors, kept: torch.Tensor
    ) -> bool:
        """Check whether the outputs were rounded to a coarser precision, or have the errors of computing in it."""
        if torch.finfo(dtype).eps <= torch.finfo(self.definition.dtype).eps:
            return False
        if all(torch.equal(recorded[name], recorded[name].to(dtype).to(recorded[name].dtype)) for name in errors):
            return True
        if dtype not in self._coarse:
            self._coarse[dtype] = self._load_coarse(dtype)
        truth = self.truth.compute(point, recorded)
        ours = torch.cat([errors[name].flatten() for name in errors])
        for definition in self._coarse[dtype]:
            coarse = definition.compute(point, recorded)
            theirs = torch.cat([(coarse[name].double() - truth[name])[kept].flatten() for name in errors])
            if ours @ theirs > _ALIKE * ours.norm() * theirs.norm():
                return True
        return False

    def _load_coarse(self, dtype: torch.dtype) -> list[Definition]:
        """Load the definition in a coarser precision; nothing but products and attention is computed in 8 bits.

        An engine rounds numbers to 8 bits or cuts them off.
        """
        if dtype is not FP8:
            return [Definition(self.truth.folder, dtype)]
        places = self.truth.folder, self.truth.dtype, self.definition.dtype
        return [Definition(*places, quantizes=True, cuts=cuts) for cuts in (False, True)]

    def _compare_sampler(self, one: Recorded, found: dict[str, PartFinding]) -> torch.Tensor:
        """Compare the reported log-probs with those of the recorded logits."""
        logits = one.recording[LayerPart(ModelPart.LOGITS)]["out"]
        tokens = torch.tensor(one.tokens[-len(one.log_probs) :])
        reported = torch.tensor(one.log_probs).double()
        truth, theirs = (
            score_tokens(logits.to(dtype), tokens, one.temperature) for dtype in (torch.float64, torch.float32)
        )
        finding = found.setdefault(SAMPLER, PartFinding(SAMPLER))
        excess = _measure_excess(reported.float(), truth, theirs)
        if excess > finding.excess:
            finding.excess, finding.worst = excess, SAMPLER
        if excess > 1:
            finding.reason = _explain_temperature(logits.double(), one) or "its log-probs are not those of its logits"
        return (reported - truth).abs()

    def _find_decided_rows(self, point: LayerPart, recorded: Tensors) -> torch.Tensor:
        """Find the rows in which rounding does not decide between experts; all rows of other parts."""
        rows = torch.ones(len(next(iter(recorded.values()))), dtype=torch.bool)
        if point.part is not ModelPart.EXPERTS:
            return rows
        scores = []
        for definition in (self.truth, self.definition):
            gate = definition.base.layers[point.layer].mlp.gate
            scores.append((recorded["in"].to(definition.dtype) @ gate.weight.T).double())
        ordered = scores[0].sort(dim=-1, descending=True).values
        count = self.truth.model.config.num_experts_per_tok
        if count >= ordered.shape[1]:
            return rows
        away = (scores[1] - scores[0]).abs().amax(dim=-1)
        # A router may compute in another order than the definition does, so its error counts several times.
        return (ordered[:, count - 1] - ordered[:, count]) > _NEAR_TIE * away

    def _log_probs(self, one: Recorded, errors: Errors) -> torch.Tensor:
        return propagate_errors(self.truth, one.tokens, len(one.log_probs), one.temperature, errors)

    def _explain(self, finding: PartFinding, has_other_weights: bool) -> str:
        if has_other_weights and _has_weights(finding):
            return "it computes with other weights than the checkpoint's"
        if finding.coarser:
            said = f"it computes in {str(finding.coarser[0]).removeprefix('torch.')}"
            if self.num_ranks > 1 and finding.name in _SUMMED:
                said += f", or the sum over {self.num_ranks} ranks does"
            return said
        if self.num_ranks > 1 and finding.name in _SUMMED:
            return f"the sum over {self.num_ranks} ranks, or the product before it, is another"
        return "it computes something else than the definition"


def _has_weights(finding: PartFinding) -> bool:
    return finding.name not in (SAMPLER, BETWEEN) and finding.name not in _WITHOUT_WEIGHTS


def _compare_between(responses: Sequence[Recorded], difference: float, findings: Iterable[PartFinding]) -> PartFinding:
    """Compare tokens and positions with the responses', and the difference with the effects of all parts."""
    total = sum(finding.effect for finding in findings)
    found = PartFinding(BETWEEN, worst=BETWEEN, effect=max(0.0, difference - total))
    if difference > _UNEXPLAINED * total:
        found.excess = difference / (_UNEXPLAINED * total) if total else float("inf")
        found.reason = (
            f"log-probs differ by {difference / total if total else float('inf'):.3g} times what the parts do"
        )
    for one in responses:
        for point in one.recording:
            expected = {"tokens": torch.tensor(one.tokens), "positions": torch.arange(len(one.tokens))}
            for name in expected.keys() & one.recording[point].keys():
                recorded, of_sampled = one.recording[point][name], point.part is ModelPart.LOG_PROBS
                # The last token is fed to no engine.
                wanted = expected[name][-len(recorded) :] if of_sampled else expected[name][: len(recorded)]
                if recorded.dim() == 1 and not torch.equal(recorded.long(), wanted):
                    found.excess, found.worst = float("inf"), str(point)
                    found.reason = f"its {name} are not those of the response"
    return found


def _measure_excess(ours: torch.Tensor, truth: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the error over its bound, in the row where this is largest."""
    if not ours.numel():
        return 0.0
    # Log-probs are a single row: one near 0 is the difference of larger numbers.
    shape = (len(ours), -1) if ours.dim() > 1 else (1, -1)
    error, of_definition, largest = (
        one.detach().abs().reshape(shape).amax(dim=1) for one in (ours.double() - truth, theirs.double() - truth, truth)
    )
    limits = torch.finfo(ours.dtype)
    # The bound of the largest row holds for rows down to a fourth of it, and then shrinks with the row.
    share = (_OWN * largest / (largest.max() + limits.tiny)).clamp(max=1)
    of_definition = torch.maximum(of_definition, share * of_definition.max())
    excess = error / (2 * of_definition + 4 * limits.eps * share * largest.max() + limits.tiny)
    return float(excess.max()) if error.isfinite().all() else float("inf")


def _explain_temperature(logits: torch.Tensor, one: Recorded) -> str | None:
    """Say so if the reported log-probs are those of the logits at another temperature."""
    tokens = torch.tensor(one.tokens[-len(one.log_probs) :])
    reported = torch.tensor(one.log_probs).double()
    fitted = _fit_temperature(logits, tokens, reported)
    away, before = (
        (score_tokens(logits, tokens, value) - reported).abs().mean() for value in (fitted, one.temperature)
    )
    if away >= before / 10:
        return None
    return f"its log-probs are those of temperature {fitted:.3g}, and not {one.temperature:g}"


def _fit_temperature(logits: torch.Tensor, tokens: torch.Tensor, reported: torch.Tensor) -> float:
    """Find the temperature that the reported log-probs are nearest to."""
    candidates = torch.logspace(-2, 2, 401, base=2, dtype=torch.float64)
    for _ in range(3):
        away = torch.stack([(score_tokens(logits, tokens, float(one)) - reported).abs().mean() for one in candidates])
        best = int(away.argmin())
        low, high = candidates[max(0, best - 1)], candidates[min(len(candidates) - 1, best + 1)]
        candidates = torch.linspace(float(low), float(high), 101, dtype=torch.float64)
    return float(candidates[50])


def propagate_errors(
    definition: Definition, tokens: Sequence[int], num_sampled: int, temperature: float, errors: Errors
) -> torch.Tensor:
    """Compute the log-probs of the last `num_sampled` tokens, with the errors added where they arose."""
    tokens_T = torch.tensor(tokens)
    positions_T = torch.arange(len(tokens))

    def compute(part: ModelPart, layer: int, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        found = definition.compute(LayerPart(part, layer), given)
        for recorded_as in {part, JOINED.get(part, part)}:
            for name, error in errors.get(LayerPart(recorded_as, layer), {}).items():
                # The last token is fed to no engine: its row decides nothing.
                found[name][: len(error)] += error
        return found

    hidden = compute(ModelPart.EMBEDDING, -1, tokens=tokens_T)["out"]
    for number, layer in enumerate(definition.base.layers):
        normed = compute(ModelPart.ATTENTION_NORM, number, **{"in": hidden})["out"]
        products = compute(ModelPart.QKV, number, **{"in": normed})
        queries, keys, values = (products[name] for name in ("queries", "keys", "values"))
        if hasattr(layer.self_attn, "q_norm"):
            queries = compute(ModelPart.QUERY_NORM, number, **{"in": queries})["out"]
            keys = compute(ModelPart.KEY_NORM, number, **{"in": keys})["out"]
        rotated = compute(ModelPart.ROTATION, number, positions=positions_T, queries=queries, keys=keys)
        attended = compute(
            ModelPart.ATTENTION, number, queries=rotated["rotated queries"], keys=rotated["rotated keys"], values=values
        )["out"]
        hidden = hidden + compute(ModelPart.ATTENTION_OUTPUT, number, **{"in": attended})["out"]
        normed = compute(ModelPart.MLP_NORM, number, **{"in": hidden})["out"]
        if hasattr(layer.mlp, "experts"):
            hidden = hidden + compute(ModelPart.EXPERTS, number, **{"in": normed})["out"]
            continue
        widened = compute(ModelPart.GATE_UP, number, **{"in": normed})
        active = compute(ModelPart.ACTIVATION, number, **widened)["out"]
        hidden = hidden + compute(ModelPart.DOWN, number, **{"in": active})["out"]
    normed = compute(ModelPart.LAST_NORM, -1, **{"in": hidden})["out"]
    predicting = normed[len(tokens) - num_sampled - 1 : -1]
    logits = compute(ModelPart.LOGITS, -1, **{"in": predicting})["out"]
    log_probs = score_tokens(logits, tokens_T[-num_sampled:], temperature)
    of_last = errors.get(LayerPart(ModelPart.LOG_PROBS))
    return log_probs if of_last is None else log_probs + of_last["out"]
