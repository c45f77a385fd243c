"""Checks of combinations of flags about the algorithm. See `checks`."""

import importlib
import math
from collections.abc import Iterator, Sequence

from megatron_rl.algorithm.declaration import HEAD
from megatron_rl.algorithm.library import ADVANTAGES, LOSS_FIELDS, LOSSES
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.config.settings import DraftSettings
from megatron_rl.environments.types import COMPONENT
from megatron_rl.errors import UsageError
from megatron_rl.flag import names_function
from megatron_rl.rewards.spec import find_weights

# The module that only runs with user-defined functions import.
_PLUG_INS = "megatron_rl.algorithm.plug_in_checks"
_FILTER, _BY = "--grpo-filter-groups-with-same-reward", "--grpo-filter-by"
_SUM = "sum"
_OF_CRITIC = (
    "critic_lr",
    "critic_warmup_iters",
    "critic_clip",
    "critic_lambda",
    "gae_lambda",
    "gae_discount",
    "gae_length_alpha",
)
_OF_TEACHER = ("opd_coef", "opd_divergence", "opd_top_k", "opd_mixture", "opd_discount")


def check_algorithm(settings: DraftSettings) -> Iterator[str]:
    """Yield each part of the algorithm that has no effect beside the others, or not the intended one."""
    algorithm = settings.algorithm
    sources = {field: source.partition(" ")[0] for field, source in settings.sources.items()}
    has_bound = algorithm.importance_truncation is not None or algorithm.correction_lower is not None
    correction, beta = "--rl-inference-logprobs-is-correction", "--grpo-kl-beta"
    over_vocabulary = "a divergence over the vocabulary, --opd-divergence reverse, forward or jsd"
    for field, needed, is_there in (
        *_list_loss_needs(algorithm.loss),
        ("spare_prompts", _FILTER, algorithm.filter_groups),
        ("kl_estimator", beta, algorithm.kl_beta > 0),
        ("kl_in", beta, algorithm.kl_beta > 0),
        *((field, "--teacher", algorithm.teacher is not None) for field in _OF_TEACHER),
        *((field, "--critic", algorithm.critic is not None) for field in _OF_CRITIC),
        ("critic_loss_coef", "--critic head", algorithm.critic == HEAD),
        ("gae_lambda", "no --gae-length-alpha", algorithm.gae_length_alpha is None),
        ("opd_top_k", over_vocabulary, algorithm.opd_divergence != "sampled"),
        ("opd_mixture", "--opd-divergence jsd", algorithm.opd_divergence == "jsd"),
        ("opd_discount", "--opd-divergence sampled", algorithm.opd_divergence == "sampled"),
        ("correction_lower", correction, algorithm.importance_correction),
        ("correction_level", correction, algorithm.importance_correction),
        ("correction_mode", correction, algorithm.importance_correction),
        ("correction_mode", "a bound, --rl-importance-sampling-truncation-coef or --grpo-correction-lower", has_bound),
        ("turn_credit", "--rollout-env, whose responses have turns", settings.environment.source is not None),
        ("filter_by", _FILTER, algorithm.filter_groups),
    ):
        # Only a flag that was written itself: --algorithm sets parts that may have no effect.
        flag = sources.get(f"algorithm.{field}", "--algorithm")
        if flag != "--algorithm" and not is_there:
            yield f"{settings.sources[f'algorithm.{field}']} needs {needed}: add it, or drop {flag}"
    if settings.sampling.tail_groups is not None and settings.sampling.tail == "stop":
        yield "--rollout-tail-groups needs --rollout-tail truncate or carry: add it, or drop --rollout-tail-groups"
    if settings.sampling.tail == "truncate" and settings.environment.has_turns:
        yield "--rollout-tail truncate cuts responses off, and not those of --rollout-env and --rollout-agent: drop one"
    if algorithm.reward_min >= algorithm.reward_max:
        yield (
            f"--grpo-reward-min {algorithm.reward_min:g} must be below --grpo-reward-max {algorithm.reward_max:g}: "
            "write a smaller one"
        )
    lowest, highest = algorithm.correction_lower, algorithm.importance_truncation
    for lower, low, upper, high in (
        ("--grpo-correction-lower", lowest, "--rl-importance-sampling-truncation-coef", highest),
        ("--grpo-reject-below", algorithm.reject_below, "--grpo-reject-above", algorithm.reject_above),
    ):
        if low is not None and high is not None and low >= high:
            yield f"{lower} {low:g} must be below {upper} {high:g}: write a smaller one"
    estimator = f"--grpo-kl-estimator {algorithm.kl_estimator}"
    if algorithm.kl_beta and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield f"{estimator} in the loss has a gradient whose mean is 0: write k2, k3 or k3+, or --grpo-kl-in reward"
    if algorithm.kl_beta and algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1":
        yield (
            f"{estimator} in the reward hardly pulls towards the reference, since the first order of its effect "
            "cancels: write k1, or --grpo-kl-in loss"
        )
    if algorithm.name == "opd" and algorithm.teacher is None:
        yield "--algorithm opd needs --teacher: write the folder of the model that teaches"
    words = algorithm.teacher or ()
    served = name_teachers(words, are_served=True)
    models = name_teachers(words) | served
    if len(models) < len(words) or ("teacher" in models and len(models) > 1):
        yield f"--teacher {' '.join(words)}: several need a name each, none of them twice; write NAME=FOLDER for each"
    if algorithm.teacher is not None and algorithm.opd_divergence != "sampled" and settings.loop.tri_model != "fused":
        yield (
            f"--opd-divergence {algorithm.opd_divergence} and --tri-model {settings.loop.tri_model} cannot be given "
            "together, because only one pass has both distributions: write --tri-model fused, or sampled"
        )
    if served and algorithm.opd_divergence != "sampled":
        yield (
            f"--opd-divergence {algorithm.opd_divergence} and --teacher {' '.join(words)} cannot be given together, "
            "because engines give log-probs of sampled tokens alone: write sampled, or drop engines:"
        )
    if served and settings.sampling.temperature != 1:
        yield (
            f"--rollout-temperature {settings.sampling.temperature:g} and --teacher {' '.join(words)} cannot be given "
            "together, because vLLM's log-probs of given tokens are at temperature 1: write 1, or drop engines:"
        )
    yield from _check_critic(settings)
    yield from _check_advantage(settings)
    if algorithm.metrics or algorithm.roles or names_function(algorithm.loss) or names_function(algorithm.advantage):
        written = {field.removeprefix("algorithm.") for field, flag in sources.items() if flag != "--algorithm"}
        plug_ins = importlib.import_module(_PLUG_INS)
        yield from plug_ins.find_plug_in_problems(algorithm, written, _read_weights(settings))
    yield from _check_filter(settings)


def _check_critic(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake in a critic beside its advantages, which it needs, and beside what it does not do."""
    algorithm, advantage = settings.algorithm, ADVANTAGES.get(settings.algorithm.advantage)
    config = settings.transformer
    takes_critic = advantage is not None and advantage.takes_critic
    if takes_critic and algorithm.critic is None:
        yield f"--grpo-advantage {algorithm.advantage} needs --critic: write a folder, or --critic policy"
    if algorithm.critic is None:
        return
    if not takes_critic:
        yield f"--critic and --grpo-advantage {algorithm.advantage} do not go together: write --grpo-advantage gae"
    for flag, is_given, remedy in (
        (f"--tri-model {settings.loop.tri_model}", settings.loop.tri_model != "fused", "write --tri-model fused"),
        ("--fp16", settings.transformer.fp16, "write --bf16"),
        ("--grpo-turn-credit", algorithm.turn_credit, "the critic counts rewards of turns by itself; drop the flag"),
        ("--weights-bridge", settings.model.weights_bridge is not None, "drop one of them"),
        (_FILTER, algorithm.filter_groups, "the critic tells what is new in equal rewards; drop the filter"),
    ):
        if is_given:
            yield f"--critic and {flag} cannot be given together: {remedy}"
    warmup, iterations = algorithm.critic_warmup_iters, settings.training.train_iters
    if iterations is not None and 0 < iterations <= warmup:
        yield f"--critic-warmup-iters {warmup} leaves none of --train-iters {iterations} to the policy: write fewer"
    if (
        warmup
        and settings.architecture is not None
        and config.moe_router_enable_expert_bias
        and config.moe_router_bias_update_rate
    ):
        yield (
            f"--critic-warmup-iters {warmup} leaves the policy as it is, and --moe-router-bias-update-rate "
            f"{config.moe_router_bias_update_rate:g} changes it: drop one of them"
        )


def _list_loss_needs(loss: str) -> Iterator[tuple[str, str, bool]]:
    """Yield each setting that only some losses read, those losses, and whether this loss is one of them.

    Which settings a loss of a user's own file reads, a trial finds out.
    """
    for field in sorted(LOSS_FIELDS):
        readers = [name for name, one in LOSSES.items() if field in one.reads]
        yield field, f"--grpo-loss {_join_words(readers)}", loss in readers or loss not in LOSSES


def _join_words(words: Sequence[str]) -> str:
    """Join words in the form "a, b or c"."""
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def _check_advantage(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake in flags beside the named advantage; a trial checks an advantage of a user's own file."""
    algorithm, config = settings.algorithm, settings.transformer
    advantage = ADVANTAGES.get(algorithm.advantage)
    compares = advantage is None or advantage.compares
    if algorithm.group_size < 2 and compares and settings.run.stage == "grpo":
        flag = f"--grpo-group-size {algorithm.group_size}"
        source = settings.sources.get("algorithm.group_size", flag)
        said, origin = (source, "") if source.startswith("--") else (flag, f" ({source})")
        yield f"{said} must be at least 2: a response is compared with the others of its group; write 2 or more{origin}"
    if advantage is None:
        return
    said = f"--grpo-advantage {advantage.name}"
    is_of_group = not (advantage.takes_baseline or advantage.takes_components or advantage.divided_over)
    if algorithm.turn_credit and not is_of_group:
        yield (
            f"--grpo-turn-credit compares turns within a group, and {said} does more: write another advantage, or drop "
            "--grpo-turn-credit"
        )
    if advantage.name == "none" and algorithm.name != "opd" and not any(list_other_terms(settings)):
        yield f"{said} leaves no gradient: add --teacher, or write another advantage"
    if advantage.takes_components:
        if settings.environment.has_turns:
            yield f"{said} takes each function of --reward, and not those of environments or agents: drop one"
        if settings.service.endpoint is not None and not settings.reward.functions:
            yield f"{said} takes the weights of --reward: write it beside --rollout-endpoint too"
        for flag, value in (("--grpo-reward-min", algorithm.reward_min), ("--grpo-reward-max", algorithm.reward_max)):
            if math.isfinite(value):
                yield f"{flag} {value:g} bounds the sum of the rewards, and {said} takes each: drop one"
    if advantage.divided_over is not None:
        is_known = settings.architecture is not None
        for what, is_given, remedy in (
            ("--grpo-kl-in loss", algorithm.kl_beta and algorithm.kl_in == "loss", "write --grpo-kl-in reward"),
            ("--grpo-entropy-coef", algorithm.entropy_coef, "drop one of them"),
            (
                f"--opd-divergence {algorithm.opd_divergence}",
                algorithm.teacher is not None and algorithm.opd_divergence != "sampled",
                "write sampled",
            ),
            ("--moe-aux-loss-coeff", is_known and config.moe_aux_loss_coeff, "drop one of them"),
            ("--moe-z-loss-coeff", is_known and config.moe_z_loss_coeff, "drop one of them"),
        ):
            if is_given:
                yield (
                    f"{what} and {said} cannot be given together, since the deviation of the advantages would divide "
                    f"this term too: {remedy}"
                )


def list_other_terms(settings: DraftSettings) -> Iterator[str]:
    """Yield the terms of the loss that have a gradient without advantages."""
    algorithm = settings.algorithm
    has_experts = settings.architecture is not None and settings.architecture.experts is not None
    if algorithm.kl_beta:
        yield "the divergence from the reference (--grpo-kl-beta)"
    if algorithm.teacher is not None:
        yield "the divergence from the teacher (--teacher)"
    if algorithm.roles:
        yield "a role from a file (--grpo-role)"
    if algorithm.entropy_coef:
        yield "the entropy (--grpo-entropy-coef)"
    if has_experts and (settings.transformer.moe_aux_loss_coeff or settings.transformer.moe_z_loss_coeff):
        yield "the auxiliary losses of routers"


def name_deciding_rewards(settings: DraftSettings) -> list[str]:
    """Return the reward functions of which one must differ within a group; return none if their sum must differ."""
    algorithm, weights = settings.algorithm, _read_weights(settings)
    if not algorithm.filter_groups or algorithm.filter_by == _SUM:
        return []
    if algorithm.filter_by is not None:
        return [algorithm.filter_by]
    if _takes_components(settings):
        return [name for name, weight in weights.items() if weight]
    return list(weights)[:1] if len(weights) > 1 else []


def _check_filter(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake in the choice of groups by their rewards."""
    algorithm, names = settings.algorithm, [*_read_weights(settings)]
    by = algorithm.filter_by
    if not algorithm.filter_groups:
        return
    if algorithm.advantage in ADVANTAGES and ADVANTAGES[algorithm.advantage].takes_baseline:
        yield (
            f"--grpo-advantage {algorithm.advantage} and {_FILTER} cannot be given together, since groups of equal "
            "rewards have advantages too, and the gradient is biased without them: write --grpo-advantage batch, or "
            "drop the filter"
        )
    if algorithm.advantage == "none":
        yield (
            f"--grpo-advantage none and {_FILTER} cannot be given together, since rewards do not count: drop the filter"
        )
    known = _list_components(settings, names)
    if by is not None and by != _SUM and known and by not in known:
        yield f"{_BY} {by} must be {_SUM} or a reward of the run: write one of {', '.join([_SUM, *known])}"
    if by is None and not names and settings.service.endpoint is not None:
        yield (
            f"{_FILTER} beside --rollout-endpoint does not say which reward decides: write {_BY} {_SUM}, {_BY} and the "
            "name of one of the sidecar's functions, or its --reward here too"
        )


def _list_components(settings: DraftSettings, names: Sequence[str]) -> list[str]:
    """List the rewards that responses have beside their sum; none if that is unknown."""
    environment, is_elsewhere = settings.environment, settings.service.endpoint is not None
    if environment.agent is not None or environment.verifiers is not None or (is_elsewhere and not names):
        # Agents name rewards as they like, and a sidecar of another start has its own.
        return []
    return [*names, *([COMPONENT] if environment.source is not None else [])]


def note_filter(settings: DraftSettings) -> Iterator[str]:
    """Yield a note of the reward that decides, if several are given and no flag names one."""
    named = name_deciding_rewards(settings)
    if named and settings.algorithm.filter_by is None and not _takes_components(settings):
        yield f"{_FILTER} compares {named[0]}, the first of --reward; {_BY} names another one, or {_SUM}"


def _takes_components(settings: DraftSettings) -> bool:
    """Check whether the advantage takes the reward functions one by one; one of a user's own file does not say."""
    advantage = ADVANTAGES.get(settings.algorithm.advantage)
    return advantage is not None and advantage.takes_components


def _read_weights(settings: DraftSettings) -> dict[str, float]:
    """Return the functions' weights by name; none if --reward cannot be read, which is reported elsewhere."""
    try:
        return find_weights(settings.reward)
    except UsageError:
        return {}
