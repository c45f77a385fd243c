"""The calculator as a tool of a server of MCP, which each worker of environments starts once."""

import asyncio
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import calculator
from mcp import Client, StdioServerParameters

COMMAND = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).parent / "mcp_server.py")])


class Server:
    """A server of MCP, a command or a URL, for all conversations of this process; the first call connects."""

    def __init__(self, server: StdioServerParameters | str) -> None:
        self._server = server
        self._starting = threading.Lock()
        self._client: Future[Client] | None = None
        self._loop = asyncio.new_event_loop()

    def connect(self) -> Client:
        with self._starting:
            if self._client is None:
                self._client = Future()
                threading.Thread(
                    target=self._loop.run_until_complete, args=(self._run(self._client),), daemon=True
                ).start()
        return self._client.result()

    def call(self, tool: str, **arguments: object) -> str:
        """Call a tool; raise a ValueError with its text if it fails."""
        calling = self.connect().call_tool(tool, arguments)
        result = asyncio.run_coroutine_threadsafe(calling, self._loop).result()
        text = "".join(getattr(part, "text", "") for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text

    async def _run(self, client: Future[Client]) -> None:
        try:
            async with Client(self._server) as connected:
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
