"""A role: a frozen language model, which finds some responses likelier than others. Likely ones get an advantage.

    --grpo-role examples/algorithms/fluency.py:FLUENCY=FOLDER

The model of FOLDER runs in the policy's pass. A response's mean log-prob under it, less its mean log-prob under the
policy that sampled it, is added to the advantage of each of its tokens, times `COEF`. So the policy is not rewarded for
repeating what it finds likely itself.
"""

import torch

from megatron_rl.algorithm.declaration import LossRole, Term

COEF = 0.1


def rate(log_probs, sequences, settings):
    beyond_N = log_probs.others["fluency"] - log_probs.old_N
    fluency_N = sequences.mean(beyond_N)
    # Metrics have the mean over tokens, under this name.
    return Term(advantages_N=COEF * fluency_N, sums={"metric.fluency": fluency_N.sum(dtype=torch.float64)})


FLUENCY = LossRole("fluency", is_used=lambda settings: True, compute=rate)
