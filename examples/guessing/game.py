"""The environment: it thinks of a number in a range, and says whether each guess is too low or too high."""

NUM_NUMBERS = 7
"""Numbers of a range: three guesses that halve what is left find each of them."""
MOST_GUESSES = 3


class Guessing:
    """A game of guessing a number; the policy has `MOST_GUESSES` guesses."""

    def reset(self, secret: int, **row) -> None:
        self.secret = secret
        self.is_found = False

    def step(self, completion: str) -> str | None:
        """Return ">" if the number is larger than the guess, "<" if not, and None once it is found."""
        # Two digits: "4" and "004" are not guesses, and neither is the number.
        guess = int(completion) if len(completion) == 2 and completion.isdecimal() else None
        self.is_found = guess == self.secret
        if self.is_found:
            return None
        return ">" if guess is None or guess < self.secret else "<"

    def get_reward(self) -> float:
        return float(self.is_found)
