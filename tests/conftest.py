"""What all tests share."""

import hypothesis

from megatron_rl import platforms


def pytest_configure() -> None:
    """Any test module may import megatron, which must not happen before its platform is there."""
    platforms.select("cpu").install()
    # How long an example takes is the machine's load.
    hypothesis.settings.register_profile("without_deadline", deadline=None)
    hypothesis.settings.load_profile("without_deadline")
