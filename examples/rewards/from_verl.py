"""A function written for verl, unchanged, and the line that makes it a reward here.

--reward examples/rewards/from_verl.py:reward
"""

from megatron_rl.rewards.verl import from_verl


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one response at a time, in verl's signature."""
    return 1.0 if solution_str.strip().endswith(str(ground_truth)) else 0.0


reward = from_verl(compute_score)
