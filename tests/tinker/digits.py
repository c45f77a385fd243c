"""An environment of verifiers' for the cookbook's recipe: it rewards the share of digits in an answer."""

import datasets
import verifiers as vf


def load_environment() -> vf.Environment:
    def count(completion: list[dict[str, str]]) -> float:
        text = completion[-1]["content"]
        return sum(letter.isdigit() for letter in text) / max(len(text), 1)

    rows = [{"question": f"say {number}", "answer": str(number)} for number in range(16)]
    return vf.SingleTurnEnv(dataset=datasets.Dataset.from_list(rows), rubric=vf.Rubric(funcs=[count]))
