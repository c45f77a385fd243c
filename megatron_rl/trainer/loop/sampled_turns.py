"""The turns of a response as text: who wrote which tokens, the reward of each turn, and where branches leave."""

from collections.abc import Sequence

from megatron_rl.observe.samples import SampledPlace, SampledTurn
from megatron_rl.shared.chat import Decode
from megatron_rl.shared.protocol.turns import Turn, list_turns
from megatron_rl.shared.protocol.wire import Response, decode_tokens


def sample_turns(
    response: Response, num_prompt_tokens: int, decode: Decode, advantages: Sequence[float] = ()
) -> list[SampledTurn] | None:
    """Decode what each side wrote; None if the policy wrote everything in one turn.

    `advantages` are those of the policy's turns, in order, if they have their own.
    """
    turns = list_turns(response)
    if len(turns) < 2:
        return None
    tokens = decode_tokens(response.tokens).tolist()
    texts = decode([tokens[turn.start : turn.end] for turn in turns])
    rewards, of_turns = iter(response.turn_rewards), iter(advantages)
    return [
        SampledTurn(
            "environment" if turn.is_given else "policy",
            text,
            turn.end - turn.start,
            None if turn.is_given else next(rewards, None),
            None if turn.after is None else _find_place(turn.after, num_prompt_tokens, turns),
            None if turn.is_given else next(of_turns, None),
        )
        for turn, text in zip(turns, texts, strict=True)
    ]


def _find_place(after: int, num_prompt_tokens: int, turns: Sequence[Turn]) -> SampledPlace:
    """Find the turn that has the token before `after`, or the prompt's token."""
    if after <= 0:
        return SampledPlace(-1, num_prompt_tokens + after if after else None)
    number, turn = next((number, turn) for number, turn in enumerate(turns) if turn.start < after <= turn.end)
    return SampledPlace(number, None if after == turn.end else after - turn.start)
