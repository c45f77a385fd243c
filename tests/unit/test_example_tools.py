"""The tools of the examples: an index, and a server of MCP."""

import math
import random

import pytest

from examples.search.library import INDEX, Index, write_facts
from tests.processes import ROOT, run_python


def score(text: str, query: str, texts: list[str]) -> float:
    """Compute BM25 as its formula is written."""
    words = [other.split() for other in texts]
    mean = sum(map(len, words)) / len(words)
    total = 0.0
    for word in query.split():
        with_word = sum(word in other for other in words)
        times = text.split().count(word)
        rarity = math.log(1 + (len(texts) - with_word + 0.5) / (with_word + 0.5))
        total += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(text.split()) / mean))
    return total


def test_an_index_ranks_texts_by_bm25() -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randrange(1, 9))) for _ in range(30)]
    for query in ("a", "a b", "g g c", "Z a"):
        expected = [text for text in texts if score(text, query, texts) > 0]
        expected.sort(key=lambda text: -round(score(text, query, texts), 9))
        assert Index(texts).search(query, most=30) == expected
    assert Index(texts).search("z") == []


def test_each_question_of_the_example_finds_its_answer_and_half_a_question_may_not() -> None:
    facts = write_facts()
    assert all(INDEX.search(question) == [f"{question} {answer}"] for question, answer in facts.items())
    assert (
        sum(INDEX.search(question.split()[1]) == [f"{question} {answer}"] for question, answer in facts.items()) == 64
    )


@pytest.mark.each_change
def test_a_tool_of_a_server_of_mcp_answers_and_reports_its_errors() -> None:
    run_python(f"""
        import sys, threading
        sys.path.insert(0, {str(ROOT / "examples" / "calculator")!r})
        from by_mcp import Calculator

        answers = []
        threads = [threading.Thread(target=lambda: answers.append(Calculator().calculate("347*285"))) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert answers == ["098895"] * 4, answers
        try:
            Calculator().calculate("347*")
        except ValueError as error:
            assert str(error).endswith("write two numbers and an operator"), error
        else:
            raise AssertionError("no error")
        """)
