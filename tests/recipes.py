"""Read flag blocks as Megatron's users write them: bash arrays in files, returned as words."""

import shlex
from pathlib import Path

FOLDER = Path(__file__).parent / "golden" / "recipes"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.sh")))
# The number of ranks that each recipe is written for.
WORLD_SIZES = {"llama3_8b": 8, "mixtral_8x7b": 16, "qwen2_5_7b": 4, "qwen3_30b_a3b": 16, "qwen3_8b": 8}


def words(name: str) -> list[str]:
    """Return the words of a recipe's arrays, one after the other."""
    text = (FOLDER / f"{name}.sh").read_text()
    tokens = shlex.split(text.replace("=(", " "), comments=True)
    return [token for token in tokens if token != ")" and not token.endswith("_ARGS")]
