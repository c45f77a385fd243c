"""The models whose results a loss is computed from, besides the policy: one file declares a role, here is the registry.

The policy is trained. The old policy is the one that sampled, the policy at an iteration's start, and every loss reads
its log-probs. Any other role is a `LossRole`, which says when a run has it, and what it adds to the loss.
"""

from collections.abc import Mapping

from megatron_rl.algorithm.declaration import LossRole
from megatron_rl.algorithm.roles import critic, reference, teacher

ROLES: Mapping[str, LossRole] = {role.name: role for role in (reference.REFERENCE, teacher.TEACHER, critic.ROLE)}
