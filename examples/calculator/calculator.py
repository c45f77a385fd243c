"""The environment: a calculator, and a question whose answer is a number too large to guess."""

import operator
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_DIGITS = 6


def compute(expression: str) -> str:
    """Return the value of two numbers with an operator between them, in six digits."""
    found = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if found is None:
        raise ValueError("write two numbers and an operator")
    return f"{OPERATORS[found[2]](int(found[1]), int(found[3])):0{NUM_DIGITS}}"


class Calculator:
    """A question, a tool that computes, and a reward for the right answer."""

    def reset(self, answer: str, **row) -> None:
        self._answer, self._is_right = answer, False

    def calculate(self, expression: str) -> str:
        """Compute the value of an expression.

        Args:
            expression: Two whole numbers with +, - or * between them.

        Returns:
            The value, in six digits.
        """
        return compute(expression)

    def step(self, completion: str) -> None:
        """Take a turn without a call, which is the answer, and end the conversation."""
        self._is_right = completion == self._answer

    def get_reward(self) -> float:
        return float(self._is_right)
