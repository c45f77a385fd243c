"""The translation of NeMo-RL's configs by `megatron-rl translate`, and its reading of them."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode, InputError
from megatron_rl.migrate import translate
from megatron_rl.migrate.nemo_config import read_nemo_config
from megatron_rl.migrate.translation import Translation
from tests.command_lines import PROMPTS, QWEN3, QWEN3_MOE, folder, keep_one_parser

# Sections that the configs below share; keys and values are NeMo-RL's.
BASE = """
checkpointing: {enabled: true, checkpoint_dir: results/run, save_period: 10, keep_top_k: 3, metric_name: "val:accuracy"}
policy: &POLICY
  model_name: "Qwen/Qwen2.5-1.5B"
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: null}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 4096
  precision: "bfloat16"
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, context_parallel_size: 1, sequence_parallel: false}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 2}"}
  dynamic_batching: {enabled: false, train_mb_tokens: 1}
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.98], eps: 1e-8}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - {milestones: [50]}
  generation:
    backend: vllm
    max_new_tokens: 3072
    temperature: 1.0
    top_p: 1.0
    top_k: null
    val_temperature: ${.temperature}
    stop_token_ids: [151643]
    vllm_cfg: {precision: "${policy.precision}", tensor_parallel_size: 2, gpu_memory_utilization: 0.6}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data:
  max_input_seq_length: 1024
  shuffle: false
  train: {data_path: train.jsonl, input_key: problem}
  default: {output_key: solution, prompt_file: null, env_name: math}
env: {math: {num_workers: 8}}
logger: {log_dir: logs, wandb_enabled: true, tensorboard_enabled: false, wandb: {project: p, name: n}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
GRPO = """
defaults: base.yaml
grpo:
  num_prompts_per_step: 128
  num_generations_per_prompt: 16
  max_num_steps: 500
  val_period: 0
  use_dynamic_sampling: true
  dynamic_sampling_max_gen_batches: 4
  normalize_rewards: false
  adv_estimator: {name: grpo, normalize_rewards: "${grpo.normalize_rewards}", use_leave_one_out_baseline: true}
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn: {reference_policy_kl_penalty: 0.04, ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: 10}
"""
DISTILLATION = """
defaults: [base.yaml]
distillation: {num_prompts_per_step: 512, topk_logits_k: 32, max_num_steps: 100}
loss_fn: {kl_type: reverse}
teacher: {model_name: Qwen/Qwen3-4B, dtensor_cfg: {tensor_parallel_size: 4}}
"""
DPO = """
defaults: base.yaml
dpo: {reference_policy_kl_penalty: 0.2, sft_loss_weight: 0.1, preference_average_log_probs: true}
policy:
  megatron_cfg:
    enabled: true
    pipeline_model_parallel_size: 2
    activation_checkpointing: true
    optimizer: {optimizer: adam, lr: 1.0e-6, min_lr: 1.0e-7, weight_decay: 0.1, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {lr_decay_style: cosine, lr_decay_iters: 200, lr_warmup_iters: 10, lr_warmup_init: 1.0e-8}
"""
PPO = """
defaults: base.yaml
ppo: {ppo_epochs: 1, policy_training_start_step: 5, adv_estimator: {name: gae, gae_lambda: 0.9, gae_lambda_value: 1.0}}
loss_fn: {reference_policy_kl_penalty: 0.0}
value: {model_name: "${policy.model_name}", optimizer: {kwargs: {lr: 1.0e-5}}}
value_loss_fn: {cliprange: 0.5}
"""
SFT = "defaults: base.yaml\nsft: {max_num_steps: 60}\n"
PLUS_PLUS = ["grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true"]
MEGATRON = "policy.megatron_cfg={enabled: true, optimizer: {lr: 1e-6, weight_decay: 0.1, clip_grad: 0.5}}"
RISE = "policy.scheduler.0.kwargs.total_iters"
SCHEDULE = "policy.megatron_cfg.scheduler"
IS = "loss_fn.truncated_importance_sampling"
CORRECTED = ["loss_fn.use_importance_sampling_correction=true"]
CONFIGS = {"grpo": GRPO, "distillation": DISTILLATION, "dpo": DPO, "ppo": PPO, "sft": SFT}


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def run_translate(at: Path, text: str, *overrides: str) -> Translation:
    (at / "base.yaml").write_text(BASE)
    (at / "run.yaml").write_text(text)
    return translate.translate(at / "run.yaml", overrides)


def is_written(found: Translation, **flags: object) -> bool:
    expected = {f"--{name.replace('_', '-')}": str(value).split() for name, value in flags.items()}
    return {name: found.words.get(name) for name in expected} == expected


def is_named(text: str, found: Translation) -> bool:
    return any(line.startswith(text) for line in found.changed)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_each_algorithm_comes_to_a_command_that_our_parser_accepts(name: str, tmp_path: Path) -> None:
    found = run_translate(tmp_path, CONFIGS[name])
    model = folder(tmp_path / "model", dataclasses.replace(QWEN3, max_position_embeddings=4096))
    found.words |= {"--hf-model": [model], "--prompts": [PROMPTS[1]], "--rollout-folder": ["run"]}
    found.words |= {"--reward": ["exact"]} if name in ("grpo", "ppo") else {}
    found.words |= {"--teacher": [model]} if name == "distillation" else {}
    assert translate.find_problems(found) == []


def test_a_grpo_config_comes_to_our_flags_with_what_its_files_and_references_say(tmp_path: Path) -> None:
    found = run_translate(tmp_path, GRPO)
    assert found.source == "NeMo-RL"
    assert is_written(
        found, grpo_prompts_per_step=128, grpo_group_size=16, global_batch_size=512, max_tokens_per_gpu=8192,
        seq_length=4096, rollout_max_tokens=3072, max_prompt_tokens=1024, train_iters=500, seed=42,
        grpo_advantage="rloo", grpo_clamp_eps_upper=0.28, grpo_dual_clip=10, grpo_kl_beta=0.04, grpo_kl_estimator="k3+",
        grpo_spare_prompts=384, grpo_filter_groups_with_same_reward="", tensor_model_parallel_size=2, adam_beta2=0.98,
        clip_grad=1.0, rollout_dtype="bfloat16", rollout_stop_tokens=151643, prompts="train.jsonl",
        prompt_key="problem", answer_key="solution", no_shuffle_prompts="", wandb_project="p",
        save="results/run", eval_temperature=1.0,
    )  # fmt: skip
    # Four updates an iteration: schedules count iterations there, and updates here.
    assert is_written(found, lr_warmup_iters=200, lr_warmup_init="5e-07", lr_decay_style="constant")
    assert (found.nodes, found.ranks, found.words["--rollout-num-engines"]) == (1, 8, ["4"])
    assert found.words.keys().isdisjoint(("--grpo-loss", "--micro-batch-size", "--eval-interval", "--tensorboard-dir"))
    assert any("too long keep their place" in text for text in found.notes)
    assert {"policy.megatron_cfg.*", "grpo.async_grpo.*"} <= set(found.meaningless)
    assert is_named("kl_input_clamp_value = 20.0, kl_output_clamp_value = 10.0: ", found)
    assert is_named("policy.optimizer.kwargs.weight_decay = 0.01: ", found)
    assert any(text.startswith("env = math gives NeMo-RL's rewards: write --reward") for text in found.missing)


@pytest.mark.parametrize(
    ("overrides", "written", "named"),
    [
        (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=null"], {"grpo_loss": "cispo"}, ""),
        (["++loss_fn.disable_ppo_ratio=true"], {"grpo_loss": "reinforce"}, "ratio_clip_c = 10: "),
        (
            ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
            {"grpo_loss": "gspo", "grpo_aggregation": "sequence"},
            "",
        ),
        (
            ["grpo.adv_estimator.normalize_rewards=true"],
            {},
            "adv_estimator.name = grpo: NeMo-RL's mean and deviation are over the group's other responses",
        ),
        (["~grpo.adv_estimator"], {}, "grpo.normalize_rewards = false: NeMo-RL's advantages read"),
        (["grpo.adv_estimator.use_leave_one_out_baseline=false"], {"grpo_advantage": "mean"}, ""),
        (
            PLUS_PLUS,
            {"grpo_advantage": "batch"},
            "use_kl_in_reward = true, reference_policy_kl_type = k3: the divergence is left out",
        ),
        (
            [*PLUS_PLUS, "grpo.adv_estimator.minus_baseline=false", "loss_fn.reference_policy_kl_type=k1"],
            {"grpo_advantage": "global", "grpo_kl_in": "reward", "grpo_kl_estimator": "k1"},
            "use_kl_in_reward = true: NeMo-RL adds a token's divergence to the advantage of its token alone",
        ),
        (
            ["loss_fn.use_on_policy_kl_approximation=true"],
            {"grpo_kl_estimator": "unbiased"},
            "use_on_policy_kl_approximation = true: ",
        ),
        (["loss_fn.reference_policy_kl_type=k2"], {"grpo_kl_estimator": "k2"}, "reference_policy_kl_type = k2: "),
        (
            [*CORRECTED, f"{IS}_type=icepop", f"{IS}_ratio=5", f"{IS}_ratio_min=0.5"],
            {"grpo_correction_mode": "mask", "grpo_correction_lower": 0.5, "rl_importance_sampling_truncation_coef": 5},
            "",
        ),
        (
            [*CORRECTED, f"{IS}_type=seq-mask-tis", f"{IS}_ratio=1.002", f"{IS}_ratio_min=0.999"],
            {"grpo_reject_below": 0.999, "grpo_reject_above": 1.002, "rl_inference_logprobs_is_correction": ""},
            "",
        ),
        (["policy.generation.top_p=0.9"], {}, "policy.generation.top_p = 0.9: "),
        (["grpo.overlong_filtering=True"], {}, "grpo.overlong_filtering = True: "),
        (["grpo.reward_scaling={enabled: true, target_min: -1}"], {}, "grpo.reward_scaling.enabled = true: "),
        (["data.max_input_seq_length=4096", "policy.generation.max_new_tokens=4096"], {}, "max_new_tokens = 4096, "),
        (["+policy.new_setting=3"], {}, "policy.new_setting = 3: this package has no such setting"),
        (["policy.scheduler=[{name: a.CosineAnnealingLR, kwargs: {T_max: 100}}]"], {"lr_decay_iters": 400}, ""),
        ([f"{RISE}=7"], {"lr_warmup_iters": 28}, "policy.scheduler.2.milestones = [50]: "),
        ([f"{RISE}=inf"], {"lr_warmup_iters": 20}, f"{RISE} = inf: "),
        (["policy.max_grad_norm=null"], {"clip_grad": 0}, ""),
        ([MEGATRON, "policy.max_grad_norm=3"], {"clip_grad": 0.5}, ""),
        ([MEGATRON, f"{SCHEDULE}.lr_warmup_iters=2"], {"lr_warmup_iters": 8, "lr_decay_style": "linear"}, ""),
        ([MEGATRON, f"{SCHEDULE}={{start_weight_decay: 0.2, end_weight_decay: 0.2}}"], {"weight_decay": 0.2}, ""),
        ([MEGATRON], {"weight_decay": 0.1}, ""),
        (["grpo.adv_estimator.name=gdpo"], {}, "adv_estimator.normalize_rewards = false: --grpo-advantage gdpo"),
        (["grpo.adv_estimator.name=gdpo"], {}, "adv_estimator.name = gdpo: NeMo-RL divides by the deviation over an"),
        (["policy.generation.temperature=$T", "loss_fn.ratio_clip_min=$E"], {"grpo_clamp_eps_lower": "$E"}, ""),
        (["grpo.dynamic_sampling_max_gen_batches=inf"], {}, "dynamic_sampling_max_gen_batches must"),
        (["+grpo.stop_at_validation_metric=accuracy"], {}, "grpo.stop_at_validation_metric = accuracy: "),
        (["+grpo.stop_at_validation_threshold=0.9"], {}, "grpo.stop_at_validation_threshold = 0.9: "),
        (["+data.train.split_validation_size=0.05"], {}, "data.train.split_validation_size = 0.05: "),
        (["+data.train.tool_key=tools"], {}, "data.train.tool_key = tools: this package has no such setting"),
        (
            ["data.train=[{data_path: a.jsonl, input_key: q}, {data_path: b.jsonl, input_key: q}]"],
            {"prompts": "a.jsonl b.jsonl", "prompt_key": "q"},
            "",
        ),
        (
            ["data.validation={data_path: b.jsonl, output_key: other}"],
            {"answer_key": "solution"},
            "output_key = solution, other: ",
        ),
        (["policy.scheduler=[{name: a.StepLR}]"], {"lr_decay_style": "constant"}, "policy.scheduler = StepLR: "),
    ],
)  # fmt: skip
def test_a_setting_of_the_command_line_is_carried_over_or_named(
    overrides: list[str], written: dict[str, object], named: str, tmp_path: Path
) -> None:
    found = run_translate(tmp_path, GRPO, *overrides)
    assert is_written(found, **written)
    assert not named or is_named(named, found)
    assert "no such setting" in named or not any("no such setting" in text for text in found.changed)


def test_a_distillation_has_its_teacher_and_its_divergence(tmp_path: Path) -> None:
    found = run_translate(tmp_path, DISTILLATION)
    assert is_written(
        found, algorithm="opd", teacher="Qwen/Qwen3-4B", opd_divergence="reverse", opd_top_k=32, grpo_group_size=1
    )
    assert is_named("distillation.topk_logits_k = 32: NeMo-RL divides the probabilities", found)
    assert not any("reward" in text for text in found.missing)
    mixed = run_translate(tmp_path, DISTILLATION, "loss_fn.kl_type=mixed")
    assert any(text.startswith("loss_fn.kl_type = mixed, mixed_kl_weight = 0.5: ") for text in mixed.missing)
    whole = run_translate(tmp_path, DISTILLATION, "loss_fn.kl_type=mixed", "+loss_fn.mixed_kl_weight=1")
    assert is_written(whole, opd_divergence="forward")


def test_preferences_have_their_schedule_in_pairs_and_no_engines(tmp_path: Path) -> None:
    found = run_translate(tmp_path, DPO)
    # NeMo-RL doubles both the configured counts and an update's step of the schedule, for the responses of a pair.
    assert is_written(found, stage="dpo", dpo_beta=0.2, lr_decay_style="cosine", lr_decay_iters=200, lr_warmup_iters=10)
    assert is_written(found, min_lr="1.0e-7", pipeline_model_parallel_size=2, tensor_model_parallel_size=4)
    assert is_written(found, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert not any(name.startswith(("--rollout", "--grpo", "--reward")) for name in found.words)
    assert is_named("dpo.sft_loss_weight = 0.1: ", found)
    assert is_named("dpo.preference_average_log_probs = true: ", found)
    assert (found.nodes, found.ranks) == (1, 8)


def test_a_critic_has_its_own_rate_and_its_own_lambda(tmp_path: Path) -> None:
    found = run_translate(tmp_path, PPO)
    assert is_written(
        found, grpo_advantage="gae", critic="policy", critic_lr="1.0e-5", gae_lambda=0.9, critic_lambda=1.0,
        critic_warmup_iters=5, critic_clip=0.5, grpo_prompts_per_step=32, train_iters=100000,
    )  # fmt: skip
    assert is_named("adv_estimator.normalize_advantages = true: ", found)
    # Each epoch over an iteration's responses is a step of the schedule there.
    by_length = ["++ppo.adv_estimator.length_adaptive_alpha=0.05", "~ppo.adv_estimator.gae_lambda_value"]
    found = run_translate(tmp_path, PPO, *by_length, "ppo.ppo_epochs=2", "ppo.num_prompts_per_step=128")
    assert is_written(found, gae_length_alpha=0.05, critic_lambda=0.9, lr_warmup_iters=100)
    assert "--gae-lambda" not in found.words


def test_a_demonstration_has_the_columns_of_its_rows(tmp_path: Path) -> None:
    found = run_translate(tmp_path, SFT, "++data.train.chat_key=chat")
    assert is_written(found, prompt_key="problem", completion_key="solution", messages_key="chat")


def test_teachers_by_name_are_advantages_without_rewards(tmp_path: Path) -> None:
    names = "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x, b: y}}"
    found = run_translate(tmp_path, GRPO, "grpo.adv_estimator.name=opd", f"+{names}")
    assert is_written(found, grpo_advantage="none", teacher="a=x b=y")
    assert any("a row's column `teacher`" in text for text in found.missing)


@pytest.mark.parametrize(
    ("cluster", "place", "nodes", "ranks"),
    [
        ({"num_nodes": 1, "gpus_per_node": 8}, {"enabled": "false", "gpus_per_node": 2}, 1, 6),
        ({"num_nodes": 3, "gpus_per_node": 8}, {"enabled": "false", "num_nodes": 1, "gpus_per_node": 8}, 2, 8),
        ({"num_nodes": 4, "gpus_per_node": 4}, {"enabled": "true"}, 2, 4),
    ],
)
def test_engines_have_the_hosts_and_devices_of_their_own_that_a_config_gives_them(
    cluster: dict[str, int], place: dict[str, object], nodes: int, ranks: int, tmp_path: Path
) -> None:
    resources = [
        f"policy.generation.colocated.resources.{key}={value}" for key, value in place.items() if key != "enabled"
    ]
    sizes = [f"cluster.{key}={value}" for key, value in cluster.items()]
    found = run_translate(tmp_path, GRPO, f"policy.generation.colocated.enabled={place['enabled']}", *resources, *sizes)
    assert (found.nodes, found.ranks) == (nodes, ranks)
    assert "--rollout-colocate" not in found.words
    assert any("--rollout-endpoint" in text for text in found.missing) == (nodes > 1)


def test_experts_have_the_division_and_the_routers_of_megatrons_section(tmp_path: Path) -> None:
    moe = "enabled: true, expert_model_parallel_size: 4, expert_tensor_parallel_size: 1, tensor_model_parallel_size: 2"
    routers = (
        "sequence_parallel: true, freeze_moe_router: true, moe_router_dtype: fp64, moe_router_load_balancing_type: none"
    )
    found = run_translate(tmp_path, GRPO, f"policy.megatron_cfg={{{moe}, {routers}, optimizer: {{lr: 1e-6}}}}")
    assert is_written(found, expert_model_parallel_size=4, expert_tensor_parallel_size=1, moe_router_dtype="fp64")
    assert is_written(found, moe_router_load_balancing_type="none")
    assert is_named("policy.megatron_cfg.freeze_moe_router = true: ", found)
    found.words |= {
        "--hf-model": [folder(tmp_path / "model", dataclasses.replace(QWEN3_MOE, max_position_embeddings=4096))],
        "--prompts": [PROMPTS[1]], "--rollout-folder": ["run"], "--reward": ["exact"],
    }  # fmt: skip
    assert translate.find_problems(found) == []


def test_the_command_of_a_program_has_its_config_and_its_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = tmp_path / "examples" / "configs"
    configs.mkdir(parents=True)
    (configs / "base.yaml").write_text(BASE)
    (configs / "grpo_math_1B.yaml").write_text(GRPO)
    script = tmp_path / "tests" / "run.sh"
    script.parent.mkdir()
    words = "grpo.max_num_steps=$MAX_STEPS ++policy.model_name=other"
    for config in ("", "--config examples/configs/grpo_math_1B.yaml"):
        script.write_text(f"MAX_STEPS=7\nuv run --extra mcore examples/run_grpo.py {config} {words} $@\n")
        found = translate.translate(script, ["grpo.seed=5"])
        assert is_written(found, train_iters=7, hf_model="other", seed=5, grpo_prompts_per_step=128)
    script.write_text("uv run examples/run_grpo.py --config $(find . -name x.yaml)\n")
    with pytest.raises(InputError, match="name the config itself, and its overrides after it"):
        translate.translate(script)
    command = ["translate", str(configs / "grpo_math_1B.yaml"), "grpo.seed=6", "++policy.model_name=third"]
    assert cli.main(command) == ExitCode.USAGE
    assert "--seed 6" in capsys.readouterr().out


def test_files_inherit_and_values_refer_to_others(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "one: &one {x: 1, y: 2}\ntwo: {z: {w: 3}, l: [1, 2]}\nleft: {q: 1}\nlater: ${one.x}\n"
    )
    (tmp_path / "d.yaml").write_text("one: {x: 4, w: 9}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.yaml").write_text("defaults: ../a.yaml\none: {x: 5}\nleft: {_override_: true, r: 2}\n")
    (tmp_path / "c.yaml").write_text(
        "defaults: [d.yaml, sub/b.yaml]\ntwo:\n  l: [7]\n  n: {m: '${..z.w}', k: '${.m}', p: 'a-${one.y}-${later}'}\n"
        "sum: ${add:${one.y}, ${mul:${one.x}, 2}}\nhalf: ${div:${one.x}, 2}\nhome: ${oc.env:HF_HOME}/x\n"
        "or: ${oc.env:HF_HOME,there}\nwhole: ${two.z}\nempty: {}\nnone:\n"
        "base: &b {f: 1, g: 2}\nmerged: {<<: *b, g: 3}\n"
        "rows: [{a: 1}, {a: '${..0.a}'}]\n"
    )
    assert read_nemo_config(tmp_path / "c.yaml") == {
        "one.x": "5", "one.y": "2", "one.w": "9", "two.z.w": "3", "two.l": "[7]", "two.n.m": "3", "two.n.k": "3",
        "two.n.p": "a-2-5",
        "left.r": "2", "later": "5", "sum": "12", "half": "2.5", "home": "$HF_HOME/x", "or": "there", "whole.w": "3",
        "empty": "{}", "none": "null", "base.f": "1", "base.g": "2", "merged.f": "1", "merged.g": "3",
        "rows.0.a": "1", "rows.1.a": "1",
    }  # fmt: skip
    overruled = read_nemo_config(
        tmp_path / "c.yaml", ["one.x=8", "++new.key=[1, 2]", "~two", "~none", "~base.f", "whole=v"]
    )
    assert (overruled["sum"], overruled["new.key"], overruled["whole"]) == ("18", "[1, 2]", "v")
    assert overruled.keys().isdisjoint(("two.l", "none", "base.f"))
    listed = read_nemo_config(tmp_path / "c.yaml", ["~rows.0", "rows.0.a=3", "two.l.0=8", "one.x.y=4"])
    assert (listed["rows.0.a"], listed["two.l"], listed["one.x.y"]) == ("3", "[8]", "4")
    for override in ("rows.2.a=3", "two.l.x=3", "~rows.a"):
        with pytest.raises(InputError, match="in a list of"):
            read_nemo_config(tmp_path / "c.yaml", [override])


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "run.yaml cannot be read"),
        ({"run.yaml": "defaults: other.yaml\npolicy: {}\n"}, "other.yaml cannot be read"),
        (
            {"run.yaml": "defaults: b.yaml\n", "b.yaml": "defaults: run.yaml\n"},
            "run.yaml inherits from itself: take it out",
        ),
        ({"run.yaml": "defaults: b.yaml\n", "b.yaml": "- policy: 1\n"}, "b.yaml must have `key: value` lines"),
        ({"run.yaml": "policy: [1\n"}, "run.yaml is not YAML"),
        ({"run.yaml": "policy: &a {b: *a}\n"}, "run.yaml is not YAML"),
        ({"run.yaml": "policy: {<<: 3}\n"}, "run.yaml is not YAML"),
        ({"run.yaml": "policy: {<<: [1, 2]}\n"}, "run.yaml is not YAML"),
        ({"run.yaml": "policy: 3\ngrpo: {seed: 1}\n"}, "run.yaml: policy = 3 must be a section"),
        ({"run.yaml": "policy: {a: 1}\ngrpo: [1, 2]\n"}, "run.yaml: grpo = [1, 2] must be a section"),
        ({"run.yaml": "policy: {a: '${b.c}'}\n"}, "policy.a refers to b.c, which is not known: write policy.a=VALUE"),
        (
            {"run.yaml": "policy: {a: '${.b}', b: '${.a}'}\n"},
            "policy.a refers to itself: write its value, policy.a=VALUE",
        ),
        ({"run.yaml": "policy: {a: '${mul:x,2}'}\n"}, "policy.a refers to mul:x,2, which is not known"),
        ({"run.yaml": "policy: {a: '${now:%Y}'}\n"}, "policy.a refers to now:%Y, which is not known"),
        ({"run.yaml": "policy: {a: 1}\nrm: {seed: 1}\n"}, "run.yaml is not a config of NeMo-RL's ppo, "),
        ({"run.yaml": "grpo: {seed: 1}\n"}, "run.yaml is not a config of NeMo-RL's ppo, "),
        # It distils rows of a data set, between tokenizers.
        (
            {"run.yaml": "policy: {a: 1}\ndistillation: {a: 1}\nloss_fn: {gold_loss: true}\n"},
            "is not a config of NeMo-RL's",
        ),
    ],
)
def test_a_config_that_is_wrong_is_one_sentence(files: dict[str, str], text: str, tmp_path: Path) -> None:
    for name, lines in files.items():
        (tmp_path / name).write_text(lines)
    with pytest.raises(InputError) as caught:
        translate.translate(tmp_path / "run.yaml")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_that_are_no_numbers_are_asked_for(tmp_path: Path) -> None:
    found = run_translate(tmp_path, GRPO, "grpo.num_prompts_per_step=many", "policy.train_global_batch_size=$SIZE")
    assert any(text.startswith("the sizes of a batch are not all numbers") for text in found.missing)
