"""What `megatron-rl translate` makes of other projects' scripts, and how it reads them."""

from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.commands import translate
from megatron_rl.commands.shell_script import read_shell_script
from megatron_rl.errors import ExitCode, InputError
from tests.documents import blocks

SLIME = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/model.sh"
ROLLOUT_ARGS=(
   --prompt-data prompts.jsonl   # a comment
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --num-rollout ${NUM_ROLLOUT:-3000}
)
GRPO_ARGS=(--advantage-estimator gspo --eps-clip 0.2 --entropy-coef 0.00)
pkill -9 python
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 4 --colocate --hf-checkpoint /root/Qwen3-4B \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} --sglang-mem-fraction-static 0.7 --lr 1e-6
"""
VERL = """
set -x
python3 -m verl.trainer.main_ppo --config-path=config \\
    algorithm.adv_estimator=grpo data.train_files=$HOME/train.parquet data.train_batch_size=1024 \\
    data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.rollout.n=5 +actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.total_epochs=15 trainer.save_freq=-1 $@
"""
TRL = """
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(output_dir="out", num_generations=16, loss_type="dr_grpo", beta=0.04, scale_rewards=False, bf16=True)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-7B", args=args, reward_funcs=[accuracy], train_dataset=load("d"))
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_slime_script_comes_to_our_flags_and_what_is_lost_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("MODEL_ARGS=(--num-layers 36 --swiglu --qk-layernorm)\n")
    found = translate.translate(write(tmp_path / "run.sh", SLIME))
    assert found.source == "slime"
    assert found.ranks == 8
    assert found.words["--grpo-prompts-per-step"] == ["32"]
    assert found.words["--train-iters"] == ["3000"]
    assert found.words["--hf-model"] == ["/root/Qwen3-4B"]
    assert found.words["--num-layers"] == ["36"]
    assert found.words["--swiglu"] == []
    assert found.words["--advantage-estimator"] == ["gspo"]
    assert found.words["--grpo-aggregation"] == ["sequence"]
    assert found.words["--grpo-entropy-coef"] == ["0.00"]
    assert {"--colocate", "--sglang-mem-fraction-static"} <= set(found.unsaid)


def test_what_slime_averages_and_estimates_is_kept_or_named(tmp_path: Path) -> None:
    by_token = SLIME.replace("--eps-clip", "--calculate-per-token-loss --eps-clip")
    assert "--grpo-aggregation" not in translate.translate(write(tmp_path / "run.sh", by_token)).words
    of_critic = SLIME.replace("estimator gspo", "estimator ppo")
    found = translate.translate(write(tmp_path / "run.sh", of_critic))
    assert "--advantage-estimator" not in found.words
    assert any(text.startswith("--advantage-estimator ppo: ") for text in found.lost)


def test_a_verl_script_comes_to_our_flags(tmp_path: Path) -> None:
    found = translate.translate(write(tmp_path / "run.sh", VERL))
    assert found.ranks == 16
    assert found.words["--global-batch-size"] == ["1280"]
    assert found.words["--grpo-prompts-per-step"] == ["1024"]
    assert found.words["--grpo-kl-beta"] == ["0.001"]
    assert found.words["--grpo-aggregation"] == ["token"]
    assert "--save-interval" not in found.words
    assert any(text.startswith("trainer.total_epochs = 15") for text in found.lost)
    assert '--prompts "$HOME/train.parquet"' in translate.write(found)


def test_a_trl_program_comes_to_our_flags(tmp_path: Path) -> None:
    found = translate.translate(write(tmp_path / "train.py", TRL))
    assert found.words["--grpo-aggregation"] == ["constant"]
    assert found.words["--grpo-advantage"] == ["mean"]
    assert found.words["--hf-model"] == ["Qwen/Qwen2.5-7B"]
    assert found.words["--bf16"] == []
    assert any(text.startswith("reward_funcs = [accuracy]") for text in found.lost)


def test_trls_settings_and_command_line_come_to_the_same(tmp_path: Path) -> None:
    of_file = translate.translate(write(tmp_path / "grpo.yaml", "num_generations: 4  # few\nbeta: 0.1\n"))
    words = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --beta=0.1\n"
    of_script = translate.translate(write(tmp_path / "run.sh", words))
    assert of_file.words == of_script.words == {"--grpo-group-size": ["4"], "--grpo-kl-beta": ["0.1"]}
    assert of_script.ranks == 4


def test_a_script_that_starts_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="starts no run that is known"):
        translate.translate(write(tmp_path / "run.sh", "echo hello\n"))
    with pytest.raises(InputError, match="cannot be read"):
        translate.translate(tmp_path / "none.sh")


def test_the_command_prints_what_a_shell_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path / "run.sh", "torchrun --nproc_per_node 2 pretrain_gpt.py --lr 1e-6 --save 'a b'\n")
    assert cli.main(["translate", str(script)]) == ExitCode.OK
    words = read_shell_script(capsys.readouterr().out).commands[0]
    assert words[:3] == ["torchrun", "--nproc-per-node", "2"]
    assert words[-4:] == ["--lr", "1e-6", "--save", "a b"]


def test_the_example_of_the_documents_prints_what_they_say(tmp_path: Path) -> None:
    script, command, printed = blocks("docs/translate.md")
    assert script.title is not None
    assert command.commands == [f"megatron-rl translate {script.title}"]
    assert translate.write(translate.translate(write(tmp_path / script.title, script.text))) == printed.text
