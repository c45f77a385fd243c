"""The environment: an amount to pay exactly, in three payments of a digit each, and a fee after the first of them."""

MOST_PAYMENTS = 3
AMOUNTS = range(4, 16)
FEES = range(6)


def write_amount(amount: int) -> str:
    return f"{amount:02}="


class Paying:
    """A game: it says what is left to pay after each payment, and is won once nothing is left."""

    def reset(self, amount: int, fee: int, **row) -> None:
        self.left, self.fee = amount, fee

    def step(self, completion: str) -> str | None:
        """Take a payment; return what is left, or None at the end: all is paid, or too much, or it is not a digit."""
        if len(completion) != 1 or not completion.isdecimal() or int(completion) > self.left:
            return None
        self.left += self.fee - int(completion)
        self.fee = 0
        return write_amount(self.left) if self.left else None

    def get_reward(self) -> float:
        return float(self.left == 0)
