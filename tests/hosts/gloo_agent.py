"""An agent whose engines receive streams over gloo, not NCCL; its flags are those of `megatron_rl.sidecar.agent`."""

import dataclasses
import sys
from typing import Any

from megatron_rl.sidecar.agent import engines
from megatron_rl.sidecar.agent.main import run_from_words
from tests.processes import ROOT

_make_process_spec = engines.make_process_spec


def _make_process_spec_over_gloo(config: Any, *arguments: Any) -> Any:
    extension = ("--worker-extension-cls", "tests.sidecar.gloo_transfer.Extension")
    over_gloo = dataclasses.replace(config, flags=(*config.flags, *extension), environment={"PYTHONPATH": str(ROOT)})
    return _make_process_spec(over_gloo, *arguments)


if __name__ == "__main__":
    engines.make_process_spec = _make_process_spec_over_gloo
    sys.exit(run_from_words(sys.argv[1:]))
