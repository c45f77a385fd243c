"""The calculator as a tool of a server of MCP, which each worker of environments starts once."""

import asyncio
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import calculator
from mcp import Client, StdioServerParameters, stdio_client

COMMAND = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).parent / "mcp_server.py")])


class Server:
    """A server of MCP over its standard streams, for all conversations of this process; the first call starts it."""

    def __init__(self, command: StdioServerParameters) -> None:
        self._command = command
        self._starting = threading.Lock()
        self._client: Future[Client] | None = None
        self._loop = asyncio.new_event_loop()

    def call(self, tool: str, **arguments: object) -> str:
        """Call a tool; raise a ValueError with its text if it fails."""
        with self._starting:
            if self._client is None:
                self._client = Future()
                threading.Thread(
                    target=self._loop.run_until_complete, args=(self._run(self._client),), daemon=True
                ).start()
        calling = self._client.result().call_tool(tool, arguments)
        result = asyncio.run_coroutine_threadsafe(calling, self._loop).result()
        text = "".join(getattr(part, "text", "") for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text

    async def _run(self, client: Future[Client]) -> None:
        try:
            async with Client(stdio_client(self._command)) as connected:
                client.set_result(connected)
                # Until the worker ends.
                await asyncio.Event().wait()
        except Exception as error:
            client.set_exception(error)


SERVER = Server(COMMAND)


class Calculator(calculator.Calculator):
    """The same question, whose tool is the server's."""

    def calculate(self, expression: str) -> str:
        """Compute the value of an expression.

        Args:
            expression: Two whole numbers with +, - or * between them.

        Returns:
            The value, in six digits.
        """
        return SERVER.call("calculate", expression=expression)
