"""The environment: an amount to pay exactly, in at most three payments of one digit each."""

MOST_PAYMENTS = 3
LARGEST = 9 * MOST_PAYMENTS


def write_amount(amount: int) -> str:
    return f"{amount:02}:"


class Paying:
    """A game: it says what is left to pay after each payment, and is won once nothing is left."""

    def reset(self, amount: int, **row) -> None:
        self.left = amount

    def step(self, completion: str) -> str | None:
        """Take a payment; return what is left, or None at the end: all is paid, or too much, or it is not a digit."""
        if len(completion) != 1 or not completion.isdecimal():
            return None
        self.left -= int(completion)
        return write_amount(self.left) if self.left > 0 else None

    def get_reward(self) -> float:
        return float(self.left == 0)
