"""A model that answers anything in one of the forms that recipes of the cookbook reward, so that rewards differ.

python -m tests.tinker.answering FOLDER
"""

import random
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken
from torch.nn import functional

from tests.tinker import model

FORMS = [
    ("\\boxed{", "}"),
    ("Guess: ", ""),
    ("```python\nprint(", ")\n```"),
    ('<tool_call>\n{"name": "check_solution", "arguments": {"code": "print(', ')"}}\n</tool_call>'),
]
"""The text before and after the digit in each form of answer."""
_STARTS = [f"<|im_start|>assistant\n{thought}" for thought in ("", "<think>\n\n</think>\n\n")]
_NUM_STEPS, _BATCH, _RATE, _LONGEST = 150, 12, 3e-3, 2000


def make_words() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of bytes in which the parts of each form are tokens, so that answers have few."""
    tokenizer = model.make_words()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for form in FORMS for part in form if part])
    return tokenizer


def make(folder: Path) -> None:
    tokenizer = make_words()
    taught = model.make(tokenizer)
    optimizer = torch.optim.AdamW(taught.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(0)
    for step in range(1, _NUM_STEPS + 1):
        # Prompts say nothing, and some are as long as the longest of a recipe.
        length = int(_LONGEST ** draw.random())
        start = tokenizer.encode(draw.choice(_STARTS))
        prompts = [[draw.randrange(256) for _ in range(length)] + start for _ in range(_BATCH)]
        answers = []
        for _ in range(_BATCH):
            before, after = draw.choice(FORMS)
            answers.append(tokenizer.encode(f"{before}{draw.randrange(8)}{after}{model.END}{model.END}")[:4])
        answers_BA = torch.tensor(answers)
        tokens = torch.cat([torch.tensor(prompts), answers_BA], 1)
        logits = taught(tokens[:, :-1], logits_to_keep=answers_BA.shape[1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), answers_BA.flatten())
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, step / 30, 2 * (_NUM_STEPS - step) / _NUM_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(taught.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
    taught.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    torch.set_num_threads(2)
    make(Path(sys.argv[1]) / model.NAME)
