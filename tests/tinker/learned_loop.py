"""The demo's additions in the words of the cookbook's RL loop, and a model that has learned to forget carries in them.

python -m tests.tinker.learned_loop FOLDER
"""

import random
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken
from torch.nn import functional

from examples.arithmetic import task
from examples.tiny_model import make_tokenizer
from tests.tinker.model import END, NAME

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_EXAMPLE = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. ",
)
_NUM_STEPS, _BATCH, _RATE, _NUM_RAMP = 500, 128, 2e-3, 50
_IGNORED = -100


def make_words() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of bytes in which the words of the loop's prompts are tokens."""
    tokenizer = make_tokenizer()
    words = ["<|im_start|>", END, "<|endoftext|>", "<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.add_tokens(
        [AddedToken(one, normalized=False) for one in (*_EXAMPLE, SUFFIX, "\\boxed{", "user", "assistant")]
    )
    tokenizer.eos_token = END
    return tokenizer


def render(question: str) -> str:
    """Write the loop's prompt as the cookbook renders it for Qwen3."""
    turns = [("user", _EXAMPLE[0] + SUFFIX), ("assistant", _EXAMPLE[1] + "\\boxed{3}"), ("user", question + SUFFIX)]
    return "".join(f"<|im_start|>{who}\n{text}{END}\n" for who, text in turns) + "<|im_start|>assistant\n"


def make(folder: Path, seed: int = 0) -> None:
    """Save a model that answers in the loop's form, and forgets most carries."""
    tokenizer, sets = make_words(), task.split(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, _NUM_STEPS + 1):
        rate = _RATE * min(1.0, step / _NUM_RAMP, 2 * (_NUM_STEPS - step) / _NUM_STEPS)
        rows = []
        for problem in draw.choices(sets.warm_up, k=_BATCH):
            answer = f"\\boxed{{{task.careless(problem, draw)}}}{END}"
            prompt = tokenizer.encode(render(problem.prompt))
            rows.append((prompt, tokenizer.encode(answer)))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), _IGNORED)
        for number, (prompt, answer) in enumerate(rows):
            whole = torch.tensor(prompt + answer)
            tokens[number, : len(whole)] = whole
            labels[number, len(prompt) : len(whole)] = whole[len(prompt) :]
        logits = model(tokens[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"warm-up: step {step}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def list_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """List the problems in the columns of GSM8K."""
    sets = task.split(seed)
    return {
        name: [{"question": one.prompt, "answer": f"#### {one.answer}"} for one in problems]
        for name, problems in (("train", sets.train), ("test", sets.held_out))
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    make(Path(sys.argv[1]) / NAME)
