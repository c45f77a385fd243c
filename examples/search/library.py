"""The environment: a question about a thing, a tool that searches texts, and a reward for the right answer."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

LETTERS = "abcdefgh"
PROPERTIES = ("age", "cost", "size", "rank")


class Index:
    """An index of texts by their words, which ranks them by BM25."""

    def __init__(self, texts: Sequence[str], saturation: float = 1.2, by_length: float = 0.75) -> None:
        self.texts = texts
        self._weights: dict[str, dict[int, float]] = defaultdict(dict)
        counts = [Counter(text.lower().split()) for text in texts]
        num_texts = Counter(word for count in counts for word in count)
        mean = sum(count.total() for count in counts) / len(counts)
        for number, count in enumerate(counts):
            length = 1 - by_length + by_length * count.total() / mean
            for word, times in count.items():
                rarity = math.log(1 + (len(texts) - num_texts[word] + 0.5) / (num_texts[word] + 0.5))
                self._weights[word][number] = rarity * times * (saturation + 1) / (times + saturation * length)

    def search(self, query: str, most: int = 1) -> list[str]:
        """Return the texts that fit the query best; none that has no word of it."""
        scores: Counter[int] = Counter()
        for word in query.lower().split():
            scores.update(self._weights.get(word, {}))
        # Texts of equal scores keep their order.
        return [self.texts[number] for number, _ in sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:most]]


def write_facts() -> dict[str, str]:
    """Write an answer for each question: a number for each property of each thing, whose name has two letters."""
    drawn = random.Random(0)
    names = [f"{first}{second}" for first in LETTERS for second in LETTERS]
    return {f"{what} {name}": f"{drawn.randrange(1000):03}" for name in names for what in PROPERTIES}


INDEX = Index([f"{question} {answer}" for question, answer in write_facts().items()])


class Library:
    """A question that only the texts answer."""

    def reset(self, answer: str, **row) -> None:
        self._answer, self._is_right = answer, False

    def search(self, query: str) -> str:
        """Search the texts.

        Args:
            query: Words of the text.

        Returns:
            The text that fits best.
        """
        return "".join(INDEX.search(query))

    def step(self, completion: str) -> None:
        """Take a turn without a call, which is the answer, and end the conversation."""
        self._is_right = completion == self._answer

    def get_reward(self) -> float:
        return float(self._is_right)
