"""Folders that hold a vision model beside the text model: the text is trained, and the vision model is copied.

Their config.json has the text model's keys in `text_config`. Tokens of text have the same number in all dimensions of
their position, so that a rope with several dimensions rotates them as a plain one does.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError

_TEXT = "text_config"
_TIED = "tie_word_embeddings"
_DTYPES = ("dtype", "torch_dtype")
# Keys of a rope that say which dimension of the position rotates which part of a head.
_DIMENSIONS = ("mrope_section", "mrope_interleaved")
IMAGE_TOKENS = (
    "image_token_id", "image_token_index", "boi_token_index", "eoi_token_index", "video_token_id",
    "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip
"""Keys of config.json for the tokens that stand for images and videos in a prompt, or enclose them."""


@dataclasses.dataclass(frozen=True)
class Images:
    """The place of the text model in such a folder."""

    text_type: str
    """The model_type of `text_config`."""
    prefix: str
    """The beginning of the text model's names, in place of `model.`."""
    tower: tuple[str, ...]
    """The beginnings of the names of the vision model's tensors."""

    def rename(self, tensor: str) -> str:
        """Return the name in such a folder of a tensor of the text model."""
        return self.prefix + tensor.removeprefix("model.") if tensor.startswith("model.") else tensor

    def unwrap(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text model's keys, as the config.json of a text model would have them."""
        text = config.get(_TEXT)
        if not isinstance(text, dict):
            raise InputError(f"config.json must have {_TEXT}, a dictionary that describes the text model")
        kind = text.get("model_type", self.text_type)
        if kind != self.text_type:
            raise InputError(f"model_type = {kind!r} in config.json's {_TEXT} must be {self.text_type!r}")
        found = {**text, **{key: config[key] for key in ("quantization_config", *_DTYPES) if key in config}}
        tied = {config[_TIED], text[_TIED]} if _TIED in config and _TIED in text else set()
        if len(tied) == 2:
            raise InputError(
                f"{_TIED} = {config[_TIED]!r} in config.json contradicts {text[_TIED]!r} in its {_TEXT}: transformers "
                "reads the first and vLLM the second; write the same"
            )
        if _TIED in config:
            found[_TIED] = config[_TIED]
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(rope := found.get(key), dict):
                found[key] = {name: value for name, value in rope.items() if name not in _DIMENSIONS}
        return found

    def wrap(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Write the config.json whose text model has these keys; the vision model has transformers' defaults."""
        outer = {key: config[key] for key in ("architectures", "model_type", _TIED, *_DTYPES) if key in config}
        text = {key: value for key, value in config.items() if key != "architectures"}
        return {**outer, _TEXT: {**text, "model_type": self.text_type}}


def list_image_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    """Map the tokens that stand for images and videos, or enclose them, to their keys of config.json."""
    return {config[key]: key for key in IMAGE_TOKENS if isinstance(config.get(key), int)}
