"""Rewards of finished groups: tokens become text, text becomes numbers, in the reward pool's processes."""

from collections.abc import Callable, Sequence

import msgspec

from megatron_rl.rollout import wire
from megatron_rl.rollout.rewards.pool import RewardPool
from megatron_rl.rollout.rewards.types import RewardRequest

Decode = Callable[[Sequence[int]], str]


class PoolScorer:
    """Scores groups in a reward pool."""

    def __init__(self, pool: RewardPool, decode: Decode):
        self._pool = pool
        self._decode = decode

    async def score(self, group: wire.Group) -> wire.Group:
        """The same group with rewards and their components."""
        completion_ids = [wire.tokens_of(response.tokens).tolist() for response in group.responses]
        request = RewardRequest(
            index=group.prompt.index,
            prompt=group.prompt.text,
            completions=[self._decode(tokens) for tokens in completion_ids],
            completion_ids=completion_ids,
            columns=group.prompt.columns,
        )
        result = await self._pool.score(request)
        responses = [
            msgspec.structs.replace(
                response,
                reward=reward,
                components={name: values[number] for name, values in result.components.items()},
            )
            for number, (response, reward) in enumerate(zip(group.responses, result.rewards, strict=True))
        ]
        return wire.Group(prompt=group.prompt, responses=responses)


def tokenizer_decoder(folder: str) -> Decode:
    """The tokenizer of a checkpoint, special tokens left out."""
    # Imported here: it costs a second, and scripted rehearsals do without it.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
