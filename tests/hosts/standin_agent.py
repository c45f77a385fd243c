"""A host's agent whose engines are stand-ins; its flags are those of `megatron_rl.sidecar.agent`."""

import asyncio
import json
import logging
import os
import sys

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.agent.main import parse, run
from tests.sidecar.standin_engines import StandInLauncher

SLOW = "STANDIN_SLOW"
"""The variable with the seconds of the steps of its first engine, as JSON."""

if __name__ == "__main__":
    # It ends with the tests, whatever ends them.
    parent.tie()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Its engines load weights from the folder that the test publishes to.
    asyncio.run(run(parse([*sys.argv[1:], "--shares-publish-folder"]), StandInLauncher(json.loads(os.environ[SLOW]))))
