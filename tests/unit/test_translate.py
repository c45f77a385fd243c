"""The translation of other projects' scripts by `megatron-rl translate`, and its reading of them."""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode, InputError
from megatron_rl.migrate import translate
from megatron_rl.migrate.launch_command import group_words
from megatron_rl.migrate.shell_script import read_shell_script
from megatron_rl.migrate.translation import Translation
from tests.command_lines import QWEN3, folder
from tests.documents import blocks

SETTINGS = tomllib.loads((Path(__file__).parents[1] / "golden" / "translated_settings.toml").read_text())
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


def translate_text(folder: Path, name: str, text: str) -> Translation:
    return translate.translate(write(folder / name, text))


def is_named(text: str, among: Sequence[str]) -> bool:
    return any(line.startswith(text) for line in among)


def test_a_slime_script_comes_to_our_flags_and_what_is_lost_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("MODEL_ARGS=(--num-layers 36 --swiglu --qk-layernorm)\n")
    found = translate_text(tmp_path, "run.sh", SLIME)
    assert found.source == "slime"
    assert found.words["--grpo-prompts-per-step"] == ["32"]
    assert found.words["--train-iters"] == ["3000"]
    assert found.words["--hf-model"] == ["/root/Qwen3-4B"]
    assert found.words["--num-layers"] == ["36"]
    assert found.words["--swiglu"] == []
    assert found.words["--grpo-loss"] == ["gspo"]
    assert found.words["--grpo-aggregation"] == ["sequence"]
    assert found.words["--grpo-entropy-coef"] == ["0.00"]
    assert found.words["--grpo-clamp-eps-upper"] == ["0.2"]
    assert {"--colocate", "--sglang-mem-fraction-static"} <= set(found.meaningless)


def test_slimes_averages_and_estimates_are_kept_or_named(tmp_path: Path) -> None:
    by_token = SLIME.replace("--eps-clip", "--calculate-per-token-loss --eps-clip")
    assert "--grpo-aggregation" not in translate_text(tmp_path, "run.sh", by_token).words
    found = translate_text(tmp_path, "run.sh", SLIME.replace("estimator gspo", "estimator reinforce_plus_plus"))
    assert "--grpo-loss" not in found.words
    assert is_named("--advantage-estimator reinforce_plus_plus: ", [*found.missing])


@pytest.mark.parametrize(
    ("beta", "divergence", "mixture"), [("", "reverse", None), ("0", "forward", None), ("0.3", "jsd", ["0.3"])]
)
def test_trls_distillation_has_a_teacher_and_needs_no_reward(
    tmp_path: Path, beta: str, divergence: str, mixture: list[str] | None
) -> None:
    given = f", beta={beta}" if beta else ""
    program = f"args = trl.DistillationConfig(per_device_train_batch_size=4, max_steps=3{given})\n"
    program += "trl.DistillationTrainer(model='student', teacher_model='teacher', args=args)\n"
    found = translate_text(tmp_path, "train.py", program)
    assert (found.words["--algorithm"], found.words["--teacher"]) == (["opd"], ["teacher"])
    assert (found.words["--opd-divergence"], found.words.get("--opd-mixture")) == ([divergence], mixture)
    assert (found.words["--grpo-group-size"], found.words["--global-batch-size"]) == (["1"], ["4"])
    assert "--grpo-kl-beta" not in found.words
    assert not is_named("--reward is missing", translate.find_problems(found))


def test_trls_preferences_have_their_loss_and_sample_nothing(tmp_path: Path) -> None:
    program = "args = trl.DPOConfig(per_device_train_batch_size=4, max_steps=3, loss_type=['ipo'], beta=0.3)\n"
    program += "trl.DPOTrainer(model='student', ref_model='other', args=args, train_dataset=rows)\n"
    found = translate_text(tmp_path, "train.py", program)
    expected = {
        "--stage": ["dpo"], "--dpo-loss-type": ["ipo"], "--dpo-beta": ["0.3"], "--grpo-ref-model": ["other"],
        "--hf-model": ["student"], "--global-batch-size": ["4"], "--micro-batch-size": ["4"], "--train-iters": ["3"],
        "--seq-length": ["1024"],
    }  # fmt: skip
    assert {name: found.words.get(name) for name in expected} == expected
    assert not any(name.startswith(("--rollout", "--grpo-group", "--reward")) for name in found.words)
    assert is_named("max_length = 1024: ", found.changed)
    assert not is_named("trl_stage", found.changed)
    loaded = translate_text(tmp_path, "train.py", program.replace("'other'", "load(x)"))
    assert "--grpo-ref-model" not in loaded.words
    assert is_named("ref_model = load(x): ", loaded.changed)


def test_the_command_of_trls_dpo_is_known_and_what_it_cannot_do_is_named(tmp_path: Path) -> None:
    script = "accelerate launch --num_processes 4 dpo.py --model_name_or_path m --f_divergence_type js_divergence"
    script += " --loss_type sigmoid sft\n"
    found = translate_text(tmp_path, "run.sh", script)
    assert (found.words["--stage"], found.ranks) == (["dpo"], 4)
    assert translate_text(tmp_path, "run.sh", "trl dpo --model_name_or_path m").words["--stage"] == ["dpo"]
    assert is_named("f_divergence_type = js_divergence: ", found.changed)
    assert is_named("loss_type = sigmoid sft is not known here: ", [*found.missing])


DISTILLED = """python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.rollout.n=2 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 algorithm.adv_estimator=grpo distillation.enabled=True \\
  distillation.nnodes=1 distillation.teacher_models.teacher_model.model_path=/big \\
  distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True \\
  distillation.distillation_loss.use_task_rewards=False distillation.distillation_loss.loss_max_clamp=10
"""


def test_verls_distillation_has_its_teachers_and_its_divergence(tmp_path: Path) -> None:
    found = translate_text(tmp_path, "run.sh", DISTILLED)
    assert (found.words["--teacher"], found.words["--grpo-advantage"]) == (["/big"], ["none"])
    # A divergence of the sampled token is the default.
    assert "--opd-divergence" not in found.words
    assert "distillation.nnodes" in found.meaningless
    assert is_named("distillation.distillation_loss.loss_max_clamp = 10: ", found.changed)
    assert not is_named("--reward", translate.find_problems(found))
    mixed = DISTILLED.replace("=k1", "=forward_kl_topk").replace("use_task_rewards=False", "distillation_loss_coef=1.5")
    mixed = mixed.replace("gradient=True", "gradient=False").replace(
        "=/big", "=/big +distillation.teacher_models.b.model_path=/b"
    )
    found = translate_text(tmp_path, "run.sh", mixed)
    assert found.words["--teacher"] == ["teacher_model=/big", "b=/b"]
    assert (found.words["--opd-divergence"], found.words["--opd-top-k"]) == (["forward"], ["32"])
    assert found.words["--opd-coef"] == ["1.5"]
    assert is_named("a row's column `teacher` chooses", [*found.missing])
    found = translate_text(tmp_path, "run.sh", DISTILLED.replace("=k1", "=mse"))
    assert is_named("loss_mode = mse with use_policy_gradient = true is not known here", [*found.missing])


def test_slimes_critic_has_slimes_defaults(tmp_path: Path) -> None:
    found = translate_text(tmp_path, "run.sh", SLIME.replace("estimator gspo", "estimator ppo --lambd 0.95"))
    assert found.words["--grpo-advantage"] == ["gae"]
    assert found.words["--gae-lambda"] == ["0.95"]
    assert found.words["--critic"] == ["policy"]
    assert found.words["--critic-clip"] == ["0.2"]
    assert not is_named("the advantages: ", found.changed)


def test_a_verl_script_comes_to_our_flags(tmp_path: Path) -> None:
    found = translate_text(tmp_path, "run.sh", VERL)
    assert found.words["--global-batch-size"] == ["1280"]
    assert found.words["--grpo-prompts-per-step"] == ["1024"]
    assert found.words["--grpo-kl-beta"] == ["0.001"]
    assert "--save-interval" not in found.words
    assert is_named("trainer.total_epochs = 15", found.changed)
    assert '--prompts "$HOME/train.parquet"' in translate.write(found)


def translate_with(project: str, words: str, folder: Path) -> Translation:
    """Translate a project's script with these settings of its own."""
    if project == "trl":
        return translate_text(folder, "grpo.yaml", f"num_processes: 4\n{words}\n")
    script = SLIME.replace("--lr 1e-6", words) if project == "slime" else VERL.replace("$@", words)
    return translate_text(folder, "run.sh", script)


@pytest.mark.parametrize("project", SETTINGS)
def test_settings_are_carried_over_with_what_follows_from_them_or_named(project: str, tmp_path: Path) -> None:
    wrong = {}
    for words, row in SETTINGS[project].items():
        found = translate_with(project, words, tmp_path)
        named = row.get("named", [])
        is_right = (
            dict(group_words(row.get("written", "").split())).items() <= found.words.items()
            and found.words.keys().isdisjoint(row.get("absent", "").split())
            and all(is_named(text, found.changed) for text in ([named] if isinstance(named, str) else named))
            and set(row.get("idle", "").split()) <= set(found.meaningless)
        )
        if not is_right:
            wrong[words] = found
    assert wrong == {}


@pytest.mark.parametrize("words", ["--rm-type deepscaler", "--custom-rm-path mine.score"])
def test_what_chooses_slimes_reward_must_be_replaced(words: str, tmp_path: Path) -> None:
    found, text = translate_with("slime", words, tmp_path), f"{words} chooses slime's reward: write --reward"
    assert is_named(text, translate.find_problems(found))
    found.words |= {"--reward": ["math"]}
    assert not is_named(text, translate.find_problems(found))


def test_a_trl_program_comes_to_our_flags(tmp_path: Path) -> None:
    found = translate_text(tmp_path, "train.py", TRL)
    assert found.words["--grpo-aggregation"] == ["constant"]
    assert found.words["--grpo-advantage"] == ["mean"]
    assert found.words["--hf-model"] == ["Qwen/Qwen2.5-7B"]
    assert found.words["--bf16"] == []
    assert is_named("reward_funcs = accuracy: write --reward FILE.py:accuracy", [*found.missing])
    assert is_named("train_dataset = load('d'): write its rows to a file", [*found.missing])
    attributes = TRL.replace("GRPOConfig(", "trl.GRPOConfig(").replace("GRPOTrainer(", "trl.GRPOTrainer(")
    assert translate_text(tmp_path, "train.py", attributes).words == found.words


@pytest.mark.parametrize(
    ("funcs", "weights", "reward"),
    [
        ("[brief, right]", "", ["rewards/mine.py:brief", "run.py:right"]),
        ("brief", ", reward_weights=[0.5]", ["rewards/mine.py:brief=0.5"]),
    ],
)
def test_a_reward_function_of_a_trl_program_is_named_by_its_file(
    funcs: str, weights: str, reward: list[str], tmp_path: Path
) -> None:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").touch()
    text = f"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from rewards.mine import brief

def right(completions, **columns):
    return [1.0 for _ in completions]

def main():
    rows = load_dataset("json", data_files="train.jsonl", split="train")
    other = load_dataset("trl-lib/DeepMath-103K", split="test")
    args = GRPOConfig(output_dir="out"{weights})
    GRPOTrainer(model="m", args=args, reward_funcs={funcs}, train_dataset=rows, eval_dataset=other)

if __name__ == "__main__":
    main()
"""
    found = translate_text(tmp_path, "run.py", text)
    assert found.words["--reward"] == [f"{tmp_path}/{name}" for name in reward]
    assert found.words["--prompts"] == ["train.jsonl"]
    assert is_named("eval_dataset = load_dataset('trl-lib/DeepMath-103K', split='test'): write", [*found.missing])
    unguarded = translate_text(tmp_path, "run.py", text.replace('if __name__ == "__main__":', "if True:"))
    assert ("--reward" in unguarded.words) == ("right" not in funcs)
    assert "right" not in funcs or any("FILE.py:right, where FILE.py" in text for text in unguarded.missing)


@pytest.mark.parametrize(
    ("funcs", "files"),
    [
        ("[right, lambda completions, **k: [0.0] * len(completions)]", "FILE.py:right FILE.py:NAME"),
        ("[partial(right, scale=2.0), 'Qwen/reward-model']", "FILE.py:NAME FILE.py:NAME"),
        ("get_functions(args, kind='a, b')", "FILE.py:NAME"),
        ("listed", "FILE.py:right FILE.py:brief"),
    ],
)
def test_a_reward_of_trl_without_a_name_is_one_function(funcs: str, files: str, tmp_path: Path) -> None:
    text = f"listed = [right, other.brief]\ntrl.GRPOTrainer(model='m', args=trl.GRPOConfig(), reward_funcs={funcs})\n"
    (said,) = (text for text in translate_text(tmp_path, "run.py", text).missing if "reward_funcs" in text)
    assert f": write --reward {files}, where" in said
    weighted = text.replace("GRPOConfig()", f"GRPOConfig(reward_weights={[0.5] * len(files.split())})")
    (said,) = (text for text in translate_text(tmp_path, "run.py", weighted).missing if "reward_funcs" in text)
    assert f": write --reward {files.replace(' ', '=0.5 ')}=0.5, where" in said


LISTED = "use_vllm: true\nreward_funcs:  # two\n  - accuracy_reward\n  # not this\n- 'mine.score'\nmax_steps: 4\n"
NESTED = "nested:\n  key: 1\n  - 2\ndatasets:\n  - path: a\n"
HUB = "dataset_name: trl-lib/DeepMath-103K\nreward_funcs: [accuracy_reward]\n"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (
            LISTED + NESTED,
            "reward_funcs = accuracy_reward mine.score: write --reward FILE.py:accuracy_reward FILE.py:score",
        ),
        (HUB, "dataset_name = trl-lib/DeepMath-103K: write its rows to a file"),
        (HUB, "reward_funcs = [accuracy_reward]: write --reward FILE.py:accuracy_reward"),
    ],
)
def test_lists_and_data_sets_of_trls_settings_are_read_and_named(text: str, missing: str, tmp_path: Path) -> None:
    found = translate_text(tmp_path, "grpo.yaml", text)
    assert is_named(missing, [*found.missing])
    assert found.words.get("--train-iters") == (["4"] if "max_steps" in text else None)


@pytest.mark.parametrize("mode", ["", "vllm_mode: colocate\n"])
def test_engines_that_share_trls_devices_share_the_ranks_devices(mode: str, tmp_path: Path) -> None:
    text = f"use_vllm: true\n{mode}num_processes: 4\nvllm_tensor_parallel_size: 2\n"
    found = translate_text(tmp_path, "grpo.yaml", text)
    assert (found.ranks, found.words.get("--rollout-num-engines")) == (4, ["2"])
    assert found.words["--rollout-colocate"] == []
    asleep = translate_text(tmp_path, "grpo.yaml", f"{text}vllm_enable_sleep_mode: true\n")
    assert asleep.words["--rollout-colocate"] == ["sleep"]
    served = translate_text(tmp_path, "grpo.yaml", text.replace("colocate", "server"))
    assert ("--rollout-colocate" in served.words) == (not mode)


def test_a_sourced_file_that_is_missing_is_named(tmp_path: Path) -> None:
    (text,) = (note for note in translate_text(tmp_path, "run.sh", SLIME).notes if "model.sh" in note)
    assert text.startswith("Not found, and its settings are missing here: source ")
    (tmp_path / "model.sh").touch()
    assert not any("model.sh" in note for note in translate_text(tmp_path, "run.sh", SLIME).notes)


@pytest.mark.parametrize("words", ["", "custom_reward_function.path=mine.py custom_reward_function.name=score"])
def test_verls_nested_answer_and_its_reward_are_named(words: str, tmp_path: Path) -> None:
    found = translate_text(tmp_path, "run.sh", VERL.replace("$@", words))
    (text,) = (text for text in found.missing if "reward_model.ground_truth" in text)
    assert "from_verl" in text
    assert ("from mine import score" in text) == bool(words)
    found.words |= {"--reward": ["math"]}
    assert text not in translate.find_problems(found)


def test_a_command_for_devices_of_another_machine_is_checked_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path / "run.sh", VERL)
    assert cli.main(["translate", str(script), "--add", "--platform cuda"]) == ExitCode.USAGE
    printed = capsys.readouterr().out
    assert "already set up" not in printed
    assert "--platform cuda" in printed


def test_trls_settings_and_command_line_come_to_the_same(tmp_path: Path) -> None:
    of_file = translate_text(tmp_path, "grpo.yaml", "num_generations: 4  # few\nbeta: 0.1\nnum_processes: 4\n")
    words = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --beta=0.1\n"
    of_script = translate_text(tmp_path, "run.sh", words)
    assert of_file.words == of_script.words
    assert (of_file.words["--grpo-group-size"], of_file.words["--grpo-kl-beta"]) == (["4"], ["0.1"])


@pytest.mark.parametrize(
    ("words", "nodes", "ranks", "engines"),
    [
        ("--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate", 1, 4, 4),
        ("--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2", 1, 4, 2),
        (
            "--actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 4 --rollout-num-gpus-per-engine 4",
            1,
            4,
            1,
        ),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", 1, 4, 2),
        ("--actor-num-gpus-per-node 8 --colocate --tensor-model-parallel-size 8", 1, 8, None),
        ("--actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate", 2, 8, None),
    ],
)
def test_a_run_takes_no_more_devices_than_there(
    words: str, nodes: int, ranks: int, engines: int | None, tmp_path: Path
) -> None:
    text = re.sub("--actor-num-nodes.*--colocate", words, SLIME)
    found = translate_text(tmp_path, "run.sh", text)
    assert (found.nodes, found.ranks) == (nodes, ranks)
    written = found.words.get("--rollout-num-engines", ["1"])
    if engines is not None:
        assert written == [str(engines)]
    assert (engines is None) == any("--rollout-endpoint" in text for text in found.missing)
    halved = [text for text in (*found.notes, *found.missing) if "alternately" in text]
    # No half of these devices has room for the model's ranks.
    is_halved = "--colocate" in words and "--tensor-model-parallel-size 8" not in words
    assert [text.startswith("slime trains and samples alternately on ") for text in halved] == [True] * is_halved


def test_a_script_that_starts_no_run_is_an_error(tmp_path: Path) -> None:
    for name, text, said in (
        ("run.sh", "echo hello\n", "starts no run that is known"),
        ("other.py", "print(1)\n", "other.py is a program that calls none of TRL's GRPOConfig, GRPOTrainer, Dist"),
        ("other.yaml", "kind: Deployment\n", "other.yaml has no setting of TRL's GRPOConfig"),
        ("run.sh", "python3 train.py --depth 3\n", "starts train.py without a known flag"),
        ("run.sh", "accelerate launch train.py --depth 3\n", "has no setting of TRL's GRPOConfig"),
    ):
        with pytest.raises(InputError, match=said):
            translate_text(tmp_path, name, text)
    with pytest.raises(InputError, match="cannot be read"):
        translate.translate(tmp_path / "none.sh")


def test_a_command_that_a_run_would_refuse_ends_in_an_error_with_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--micro-batch-size 3 --eval-interval 5 --actor-num-gpus-per-node 4"
    script = write(tmp_path / "run.sh", SLIME.replace("--lr 1e-6", words).replace("/root/Qwen3-4B", "Qwen/Qwen3-4B"))
    assert cli.main(["translate", str(script)]) == ExitCode.USAGE
    printed = capsys.readouterr().out
    listed = printed[printed.index("# What you must add or change:") : printed.index("torchrun")]
    for said in (
        "Qwen/Qwen3-4B",
        "--micro-batch-size 3 is neither a multiple nor a divisor of --grpo-group-size 8",
        "--reward is missing",
    ):
        assert said in listed


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            SLIME.replace("--n-samples-per-prompt 8", "--num-steps-per-rollout 2"),
            "--n-samples-per-prompt is missing, and slime's default is 1",
        ),
        (VERL.replace("actor_rollout_ref.rollout.n=5 ", ""), "actor_rollout_ref.rollout.n is missing, and verl's"),
    ],
)
def test_a_group_size_that_is_left_to_its_default_of_one_must_be_added(script: str, said: str, tmp_path: Path) -> None:
    found = translate_text(tmp_path, "run.sh", script)
    assert found.words.keys().isdisjoint(("--grpo-group-size", "--global-batch-size"))
    problems = translate.find_problems(found)
    assert is_named(said, problems)
    assert any("write --global-batch-size" in problem for problem in problems)
    assert not any("--grpo-group-size 1" in problem for problem in problems)
    found.words |= {"--grpo-group-size": ["8"]}
    assert not is_named(said, translate.find_problems(found))


def test_a_command_that_is_complete_with_what_is_added_ends_in_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder(tmp_path, dataclasses.replace(QWEN3, max_position_embeddings=32768))
    (tmp_path / "prompts.jsonl").write_text("")
    script = write(tmp_path / "run.sh", SLIME.replace("gspo", "grpo"))
    added = (
        f"--hf-model {model} --prompts {tmp_path / 'prompts.jsonl'} --reward exact --rollout-folder {tmp_path / 'r'}"
    )
    assert cli.main(["translate", str(script), "--add", added]) == ExitCode.USAGE
    assert "rollout-endpoint" in capsys.readouterr().out
    script.write_text(script.read_text().replace("--actor-num-nodes 2", "--actor-num-nodes 1"))
    assert cli.main(["translate", str(script), "--add", added]) == ExitCode.OK
    assert "What you must add" not in capsys.readouterr().out


def test_the_command_prints_what_a_shell_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path / "run.sh", "torchrun --nproc_per_node 2 pretrain_gpt.py --lr 1e-6 --save 'a b'\n")
    assert cli.main(["translate", str(script)]) == ExitCode.USAGE
    words = read_shell_script(capsys.readouterr().out).commands[0]
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    assert words[-4:] == ["--lr", "1e-6", "--save", "a b"]


def test_the_command_for_several_hosts_names_a_port_that_all_of_them_know(tmp_path: Path) -> None:
    text = SLIME.replace("--actor-num-nodes 2", "--actor-num-nodes 4")
    script = write(tmp_path / "run.sh", text)
    words = read_shell_script(translate.write(translate.translate(script))).commands[0]
    place = ["--node-rank", "$NODE_RANK", "--master-addr", "$MASTER_ADDR", "--master-port", "29500"]
    assert words[:9] == ["torchrun", "--nnodes", "2", *place]


def test_the_example_of_the_documents_prints_what_they_say(tmp_path: Path) -> None:
    *_, script, command, printed, _ = blocks("docs/recipes.md")
    assert script.title is not None
    assert command.commands == [f"megatron-rl translate {script.title}"]
    found = translate.translate(write(tmp_path / script.title, script.text))
    assert translate.write(found, translate.find_problems(found)) == printed.text
