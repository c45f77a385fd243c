"""The recipes in examples/ are command lines that this package takes."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
import transformers

from examples import tiny_model
from megatron_rl.command_line.run import compute_sizes
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.types import Architecture, Rope
from tests.command_lines import folder, parse
from tests.processes import ROOT

QWEN3_4B = Architecture(
    family="qwen3", num_layers=36, hidden_size=2560, ffn_hidden_size=9728, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, vocab_size=151936, max_position_embeddings=40960, rope=Rope(base=1e6), qk_layernorm=True,
    tied_embeddings=True, dtype="bfloat16",
)  # fmt: skip
# A recipe, the flags it needs, and its ranks; None for the sidecar.
RECIPES = [
    ("one_gpu", {}, 1),
    ("eight_gpus", {}, 4),
    ("eight_npus", {"VLLM_PYTHON": "python"}, 4),
    ("several_nodes", {"ROLE": "trainer", "NODES": "2", "NODE_RANK": "0", "MASTER": "10.0.0.2"}, 16),
    ("several_nodes", {"ROLE": "sidecar"}, None),
]


def test_the_tiny_model_reads_any_text_and_belongs_to_a_known_family(tmp_path):
    tiny_model.save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "What is 3 + 4? Drei, \u00e9\u4e09."
    assert len(tokenizer(text)["input_ids"]) == len(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    found = read_architecture(tmp_path)
    assert (found.family, found.vocab_size) == ("qwen3", len(tokenizer))


@pytest.mark.parametrize(("name", "environment", "world_size"), RECIPES, ids=lambda value: str(value)[:24])
def test_a_recipe_says_what_this_package_understands(name, environment, world_size, tmp_path):
    model = folder(tmp_path / "model", QWEN3_4B)
    words = said_by(name, [model, "train.jsonl", "test.jsonl", str(tmp_path / "run")], environment, tmp_path)
    if world_size is None:
        assert sidecar_settings.parse(words[words.index("megatron_rl.sidecar") + 1 :]).rollout.num_engines == 4
        return
    flags = words[words.index("pretrain_grpo.py") + 1 :]
    if "--platform" not in flags:
        flags += ["--platform", "cpu"]
    assert ("--rollout-colocate" in flags) == (name == "one_gpu")
    settings = parse(*[word if word != "npu" else "cpu" for word in flags], world_size=world_size)
    sizes = compute_sizes(settings, 2)
    assert sizes.plan.num_updates == 1
    assert sizes.plan.num_prompts * sizes.plan.group_size == 1024


# The end of a patched recipe of Mixtral, which reads the arguments.
MIXTRAL = """
CHECKPOINT_PATH=$1
MODEL_ARGS=(--num-layers 36)
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    --save $CHECKPOINT_PATH \\
    ${GRPO_ARGS}
"""


def test_a_recipe_of_megatron_gets_what_grpo_needs(tmp_path):
    model, tree = folder(tmp_path / "model", QWEN3_4B), tmp_path / "tree"
    arguments = [str(tree), model, "train.jsonl", str(tmp_path / "run")]
    words = said_by("megatron_tree", arguments, {}, tmp_path, "recipes")
    start = words.index("megatron_rl.recipe")
    assert words[start - 1 : start + 2] == ["-m", "megatron_rl.recipe", f"{tree}/pretrain_gpt.py"]
    settings = parse(*words[start + 2 :], "--platform", "cpu", world_size=4)
    plan = compute_sizes(settings, 2).plan
    assert (plan.num_updates, plan.num_prompts * plan.group_size) == (1, 1024)


def test_a_shell_recipe_hands_on_what_grpo_needs(tmp_path):
    script = tmp_path / "tree" / "examples" / "mixtral" / "train_mixtral_8x7b_distributed.sh"
    script.parent.mkdir(parents=True)
    script.write_text(MIXTRAL)
    words = said_by("shell_recipe", [str(tmp_path / "tree"), "model", "train.jsonl", "run"], {}, tmp_path, "recipes")
    assert words[2:7] == ["pretrain_gpt.py", "--num-layers", "36", "--save", "run"]
    assert words[7:11] == ["--hf-model", "model", "--prompts", "train.jsonl"]
    assert words[-2:] == ["--rollout-endpoint", "10.0.0.1:8700"]


# A model file of slime's for Qwen3-4B says the same.
SLIME_MODEL = """
MODEL_ARGS=(
   --swiglu
   --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
   --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
   --normalization "RMSNorm" --norm-epsilon 1e-6 --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --vocab-size 151936 --kv-channels 128 --qk-layernorm
)"""


@pytest.mark.parametrize("name", ["slime_model", "mindspeed"])
def test_flags_of_other_projects_train_beside_those_of_grpo(name, tmp_path):
    model, source = folder(tmp_path / "model", QWEN3_4B), tmp_path / "slime"
    file = source / "scripts" / "models" / "qwen3-4B.sh"
    file.parent.mkdir(parents=True)
    file.write_text(SLIME_MODEL)
    arguments = [model, "train.jsonl", str(tmp_path / "run")]
    arguments = [str(source), *arguments] if name == "slime_model" else arguments
    words = said_by(name, arguments, {"VLLM_PYTHON": "python"}, tmp_path, "recipes")
    # The last words win.
    settings = parse(*words[words.index("pretrain_grpo.py") + 1 :], "--platform", "cpu", world_size=4)
    plan = compute_sizes(settings, 2).plan
    assert (plan.num_updates, plan.num_prompts * plan.group_size) == (1, 1024)


def said_by(
    name: str, arguments: list[str], environment: dict[str, str], place: Path, subject: str = "gsm8k"
) -> list[str]:
    """Return the words that a recipe starts torchrun, or Python, with."""
    programs = place / "programs"
    programs.mkdir()
    for program in ("torchrun", "python"):
        path = programs / program
        path.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    shared = {"ADDRESS": "10.0.0.1:8700", "SHARED": "shared"}
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / subject / f"{name}.sh"), *arguments],
        env={**os.environ, **shared, **environment, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return result.stdout.splitlines()
