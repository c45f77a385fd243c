"""Run the demo: a tiny model learns to pay an amount exactly in chats with an agent of the openai client, on real vLLM.

python -m examples.agent.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

from pathlib import Path

import transformers

from examples.arithmetic.model import END
from examples.paying.demo import run_demo

# A chat is written as the game of examples/paying is: the payments stand after what is left, each with its end.
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
)


def add_template(folder: Path) -> None:
    """Give the model's tokenizer the template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def main() -> None:
    agent = Path(__file__).parent / "payer.py"
    run_demo(__doc__, "agent", ["--rollout-agent", f"{agent}:pay", "--prompt-chat"], add_template)


if __name__ == "__main__":
    main()
