"""What all tests share."""

from megatron_rl import platforms


def pytest_configure() -> None:
    """Any test module may import megatron, which must not happen before its platform is there."""
    platforms.select("cpu").install()
