"""Train a language model with GRPO on Megatron: torchrun pretrain_grpo.py <Megatron's flags and ours, docs/flags.md>"""

import sys

from megatron_rl.arguments import parse_run
from megatron_rl.describe import print_config
from megatron_rl.errors import ExitCode, MegatronRLError


def main() -> int:
    """Returns the exit code: docs/operations.md lists them."""
    try:
        settings = parse_run()
        if settings.run.print_config:
            print(print_config(settings), end="")
            return ExitCode.OK
        # Megatron is imported once the platform is installed, which parsing does.
        from megatron_rl.training.run import train

        return train(settings)
    except MegatronRLError as error:
        for problem in error.problems:
            print(f"pretrain_grpo.py: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("pretrain_grpo.py: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
