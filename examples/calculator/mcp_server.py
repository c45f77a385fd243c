"""A calculator as a server of MCP, over its standard streams."""

from calculator import compute
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

SERVER = MCPServer("calculator")


@SERVER.tool()
def calculate(expression: str) -> str:
    """Compute the value of two whole numbers with +, - or * between them, in six digits."""
    try:
        return compute(expression)
    except ValueError as error:
        # The policy reads the text of this error alone.
        raise ToolError(str(error)) from None


if __name__ == "__main__":
    SERVER.run("stdio")
