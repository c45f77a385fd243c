"""The reward `model:FOLDER[:LABEL]`: a classifier in Hugging Face's format, which gives each response one number.

Invariants:

- a reward follows from the text of its prompt and response alone: each has a pass of its own, without padding, because
  what is computed beside a sequence changes its last bits;
- no weight is drawn, and no code of the folder is run: a folder that lacks a weight is refused, and weights are read
  from safetensors alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.rewards.model_folders import check_folder

NAME = "model"
_ARCHITECTURE = "ForSequenceClassification"
_OPTIONS: Any = {"local_files_only": True, "trust_remote_code": False}


def split_label(argument: str) -> tuple[str, str | None]:
    """Divide FOLDER:LABEL; a folder that exists under the whole name has no label."""
    folder, colon, label = argument.rpartition(":")
    return (folder, label) if colon and not Path(argument).exists() else (argument, None)


def read_classifier(argument: str | None) -> tuple[Path, int | None]:
    """Return a classifier's folder and the number of the label; None if the model has one number alone.

    Raise a ValueError if the model is no classifier, or has several labels and none is named.
    """
    place, label = split_label(argument or "")
    folder = check_folder(place, NAME)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        names = config.get("architectures") or ["no architecture"]
        # As transformers has it, where the file does not say.
        labels = config.get("id2label") or {number: f"LABEL_{number}" for number in range(config.get("num_labels", 2))}
        numbers = {str(text): int(number) for number, text in labels.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}; name a model's folder") from None
    if not str(names[0]).endswith(_ARCHITECTURE):
        raise ValueError(f"{folder} has {names[0]}, and must have a model whose name ends in {_ARCHITECTURE}")
    if label not in numbers and (label is not None or len(numbers) > 1):
        named = "has no label " + label if label is not None else f"has {len(numbers)} labels, and a reward is one"
        raise ValueError(f"{folder} {named}: write {NAME}:{folder}:LABEL with one of {', '.join(numbers)}")
    return folder, numbers[label] if label is not None and len(numbers) > 1 else None


class Classifier:
    """A reward function of TRL's signature, once `load` has been called."""

    def __init__(self, argument: str | None) -> None:
        self._argument = argument

    def load(self, device: str) -> None:
        """Load the model; raise a ValueError if the folder is not whole."""
        import torch
        import transformers

        folder, self._label = read_classifier(self._argument)
        # The bits of a sum over several threads follow their number.
        torch.set_num_threads(1)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_OPTIONS)
        model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **_OPTIONS
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{folder} lacks the weights {', '.join(missing[:3])}: name a classifier that was trained")
        self._model = model.eval().to(device)
        positions = getattr(model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        self._longest = min(positions, self._tokenizer.model_max_length)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        return [self._score(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def _score(self, prompt: Any, completion: Any) -> float:
        import torch

        token_ids = self._encode(prompt, completion)
        if len(token_ids) > self._longest:
            raise ValueError(
                f"prompt and response have {len(token_ids)} tokens, and the model of {self._argument} takes at most "
                f"{self._longest}: lower --seq-length, or choose another model"
            )
        tokens = torch.tensor([token_ids], device=self._model.device)
        with torch.inference_mode():
            scores = self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0].float()
        return float(scores[0] if self._label is None else scores.softmax(dim=-1)[self._label])

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        """Tokenize a text, or a chat as the classifier's own template writes it."""
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt + completion)["input_ids"])
        if not self._tokenizer.chat_template:
            raise ValueError(f"the prompts are chats, and the tokenizer of {self._argument} has no chat template")
        text = self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def make_model(argument: str | None, timeout: float) -> Classifier:
    """Make model:FOLDER[:LABEL]: the number that a classifier gives a response, or the probability of a label.

    It is loaded by its worker, which has no other function.
    """
    return Classifier(argument)
