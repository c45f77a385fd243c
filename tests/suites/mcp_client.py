"""The client of MCP that the conformance suite runs: the example's client does what the scenario asks of it."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "calculator"))
from by_mcp import Server

if __name__ == "__main__":
    server = Server(sys.argv[1])
    match os.environ["MCP_CONFORMANCE_SCENARIO"]:
        case "initialize":
            print(server.connect().server_info.name)
        case "tools_call":
            print(server.call("add_numbers", a=20, b=22))
        case "sse-retry":
            print(server.call("test_reconnection"))
