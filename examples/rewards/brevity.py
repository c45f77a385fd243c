"""Rewards of a user's own, in TRL's signature: --reward examples/rewards/brevity.py:brevity=0.2"""


def brevity(completions, **kwargs):
    """Return one for an empty completion, half of it at 200 characters, toward zero beyond."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [200 / (200 + len(text)) for text in texts]


async def answers_in_time(completions, deadline=None, **kwargs):
    """Check that the text names the row's `deadline`; rows without that column are left to the other rewards."""
    if deadline is None:
        return [None] * len(completions)
    return [float(str(wanted) in str(completion)) for completion, wanted in zip(completions, deadline, strict=True)]
