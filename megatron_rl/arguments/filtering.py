"""The rewards that decide whether a group has a signal, for --grpo-filter-groups-with-same-reward."""

from collections.abc import Iterator

from megatron_rl.algorithm.library import ADVANTAGES
from megatron_rl.config.settings import DraftSettings
from megatron_rl.errors import UsageError
from megatron_rl.rewards.spec import find_weights

_FILTER, _BY = "--grpo-filter-groups-with-same-reward", "--grpo-filter-by"
_SUM = "sum"


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


def check_filter(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake in the choice of groups by their rewards."""
    algorithm, names = settings.algorithm, [*_read_weights(settings)]
    by = algorithm.filter_by
    if by is not None and not algorithm.filter_groups:
        yield f"{_BY} {by} needs {_FILTER}: add it, or drop {_BY}"
    if not algorithm.filter_groups:
        return
    if algorithm.advantage in ADVANTAGES and ADVANTAGES[algorithm.advantage].takes_baseline:
        yield (
            f"--grpo-advantage {algorithm.advantage} and {_FILTER} cannot be given together, since groups of equal "
            "rewards have advantages too, and the gradient is biased without them: write --grpo-advantage batch, or "
            "drop the filter"
        )
    if by is not None and by != _SUM and names and by not in names:
        yield f"{_BY} {by} must be {_SUM} or a function of --reward: write one of {', '.join([_SUM, *names])}"
    if by is None and not names and settings.service.endpoint is not None:
        yield (
            f"{_FILTER} beside --rollout-endpoint does not say which reward decides: write {_BY} {_SUM}, {_BY} and the "
            "name of one of the sidecar's functions, or its --reward here too"
        )


def note_filter(settings: DraftSettings) -> Iterator[str]:
    """Yield a note of the reward that decides, if several are given and no flag names one."""
    named = name_deciding_rewards(settings)
    if named and settings.algorithm.filter_by is None and not _takes_components(settings):
        yield f"{_FILTER} compares {named[0]}, the first of --reward; {_BY} names another one, or {_SUM}"


def _takes_components(settings: DraftSettings) -> bool:
    """Return whether the advantage takes the reward functions one by one; one of a person's own file does not say."""
    advantage = ADVANTAGES.get(settings.algorithm.advantage)
    return advantage is not None and advantage.takes_components


def _read_weights(settings: DraftSettings) -> dict[str, float]:
    """Return the functions' weights by name; none if --reward cannot be read, which is reported elsewhere."""
    try:
        return find_weights(settings.reward)
    except UsageError:
        return {}
