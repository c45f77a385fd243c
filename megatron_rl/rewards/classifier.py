"""The reward `model:FOLDER`: a classifier in Hugging Face's format, which gives each response one number.

Invariants:

- a reward follows from its prompt and response alone: each has a pass of its own, without padding, because what is
  computed beside a sequence changes its last bits;
- a completion is text: what would be special tokens in it is removed, so that it cannot end its own turn;
- no weight is drawn, and no code of the folder is run: a folder that lacks a weight is refused, and weights are read
  from safetensors alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.rewards.model_folders import CLASSIFIER, check_folder, read_special_tokens, remove_special_tokens

_OPTIONS: Any = {"local_files_only": True, "trust_remote_code": False}


def check_classifier(argument: str | None) -> Path:
    """Return a classifier's folder; raise a ValueError if its model does not give one number."""
    folder = check_folder(argument, CLASSIFIER)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        name = str((config.get("architectures") or ["no architecture"])[0])
        # Two, if the file does not say: so has transformers.
        count = len(config.get("id2label") or range(config.get("num_labels", 2)))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}; name a model's folder") from None
    if not name.endswith("ForSequenceClassification") or count != 1:
        raise ValueError(f"{folder} has {name} with {count} labels, and must be a ForSequenceClassification with 1")
    return folder


class Classifier:
    """A reward function of TRL's signature, once `load` has been called."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def load(self, device: str) -> None:
        """Load the model; raise a ValueError if a weight is missing."""
        import torch
        import transformers

        # The bits of a sum over several threads follow their number.
        torch.set_num_threads(1)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder, **_OPTIONS)
        model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
            self._folder, dtype="auto", use_safetensors=True, output_loading_info=True, **_OPTIONS
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"the folder lacks {', '.join(missing[:3])}: name a classifier that was trained")
        self._model = model.eval().to(device)
        self._special = read_special_tokens(Path(self._folder))
        longest = self._tokenizer.model_max_length
        self._longest = min(longest, getattr(model.config, "max_position_embeddings", None) or longest)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        import torch

        rewards = []
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = torch.tensor([self._encode(prompt, completion)], device=self._model.device)
            with torch.inference_mode():
                rewards.append(float(self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits))
        return rewards

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        """Tokenize a text, or a chat as the classifier's own template writes it."""
        completion = remove_special_tokens(completion, self._special)
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt + completion)["input_ids"]
        elif self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            raise ValueError(f"the prompts are chats, and the tokenizer in {self._folder} has no chat template")
        if len(ids) > self._longest:
            raise ValueError(f"prompt and response have {len(ids)} tokens, and the model takes at most {self._longest}")
        return ids


def make_model(argument: str | None, timeout: float) -> Classifier:
    """Make model:FOLDER: the number that a classifier gives a response; its worker loads it."""
    return Classifier(argument or "")
