"""Run ours an iteration at a request: `python -m benchmarks.gpu.rival_ours PIPES <flags of pretrain_grpo.py>`."""

import sys

from benchmarks.gpu.players import Player
from megatron_rl import platforms
from megatron_rl.command_line.parse import parse_run


def main() -> None:
    pipes, *words = sys.argv[1:]
    settings = parse_run(words)
    from megatron_rl.trainer.loop.reporter import MetricsReporter
    from megatron_rl.trainer.loop.run import train

    player = Player(pipes, platforms.select(settings.platform).synchronize)
    begin = MetricsReporter.begin

    def begin_at_request(self: MetricsReporter, version: int) -> None:
        """Wait where the loop has just ended an iteration, before it publishes."""
        player.begin()
        begin(self, version)

    MetricsReporter.begin = begin_at_request  # type: ignore[method-assign]
    train(settings)
    player.end()


if __name__ == "__main__":
    main()
