"""Turn-level credit: each turn of a conversation has the advantage of the rewards from it on.

With K conversations of a group, r_ij the reward of turn j of conversation i and T_i its turns:

    G_ik = r_ik + r_i,k+1 + ... + r_i,T_i, and 0 if the conversation was over before turn k
    A_ik = the advantage of G_ik among G_1k, ..., G_Kk, as --grpo-advantage computes it of rewards
"""

from collections.abc import Callable, Sequence

import numpy as np


def compute_turn_advantages(
    rewards: Sequence[Sequence[float]], advantage: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Compute the advantages of each conversation's turns from the rewards of all of them.

    Every turn is compared with all conversations of the group: one that is over gets nothing more.
    """
    returns_KT = np.zeros((len(rewards), max(map(len, rewards))), dtype=np.float64)
    for number, of_turns in enumerate(rewards):
        returns_KT[number, : len(of_turns)] = np.cumsum(np.asarray(of_turns, dtype=np.float64)[::-1])[::-1]
    advantages_KT = np.stack([advantage(returns_K) for returns_K in returns_KT.T], axis=1)
    return [advantages_T[: len(of_turns)] for advantages_T, of_turns in zip(advantages_KT, rewards, strict=True)]
