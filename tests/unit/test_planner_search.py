"""The best split, and the command `megatron-rl plan`."""

import dataclasses
import json
import math
import shlex

import pytest

from megatron_rl import cli
from megatron_rl.analysis.plan.chips import CHIPS
from megatron_rl.analysis.plan.command_lines import Files, list_notes, write_command
from megatron_rl.analysis.plan.costs import Setting
from megatron_rl.analysis.plan.figures import TrainedAdapters
from megatron_rl.analysis.plan.lengths import Lognormal, Uniform
from megatron_rl.analysis.plan.memory import fits_trainer
from megatron_rl.analysis.plan.search import Wanted, _list_splits, describe_candidates, search
from megatron_rl.config.rank_bytes import Micro
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.observe import run_folder
from megatron_rl.shared.weights import families
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.types import Experts
from tests.command_lines import PROMPTS, parse_run
from tests.unit.test_examples import QWEN3_4B
from tests.unit.test_planner_costs import BATCHING, SETTING, TRAINER, Costs, recorded  # noqa: F401

WANTED = Wanted(
    architecture=QWEN3_4B,
    chip=CHIPS["h100"],
    num_devices=8,
    devices_per_host=8,
    setting=Setting("periodic", 64, 8, 8, Uniform(100, 500), Lognormal(1000, 0.8, 4096)),
    longest_prompt=512,
    longest_response=4096,
    recomputes=True,
)
SEARCH = ["--hf-model", "MODEL", "--devices", "8"]
SPARSE = dataclasses.replace(
    QWEN3_4B, family="qwen3_moe", num_layers=48, hidden_size=2048, num_query_groups=4, tied_embeddings=False,
    experts=Experts(num_experts=128, num_active=8, ffn_hidden_size=768),
)  # fmt: skip


@pytest.mark.parametrize(("architecture", "devices"), [(QWEN3_4B, 8), (QWEN3_4B, 24), (SPARSE, 64)])
def test_every_split_uses_all_devices_divides_the_model_and_fits(architecture, devices):
    wanted = dataclasses.replace(WANTED, architecture=architecture, num_devices=devices)
    splits = list(_list_splits(wanted))
    assert splits
    for split in splits:
        assert split.trainer_devices + split.engine_devices == devices
        assert architecture.num_layers % split.pipeline == 0
        assert architecture.num_query_groups % split.tensor == 0
        assert 64 % split.replicas == 0
    for one in search(wanted, 4, 1):
        micro = Micro(512 + 8 * 4096, one.setting.slots)
        assert fits_trainer(architecture, one.split, micro, 80, recomputes=True)
        assert one.setting.num_devices == devices


def test_the_first_is_the_best_of_what_was_simulated_and_no_worse_than_a_plain_half():
    found = search(WANTED, 12, 2)
    speeds = [one.result.tpspd for one in found]
    assert speeds == sorted(speeds, reverse=True)
    half = [one for one in found if one.split.trainer_devices == 4]
    assert not half or found[0].result.tpspd >= max(one.result.tpspd for one in half)
    assert len(describe_candidates(found)) == len(found) + 1


def test_slower_sampling_moves_devices_to_the_engines():
    long = dataclasses.replace(WANTED.setting, responses=Lognormal(1000, 0.8, 4096), num_prompts=512)
    fast = dataclasses.replace(WANTED, setting=long, num_devices=32)
    slow = dataclasses.replace(fast, chip=dataclasses.replace(WANTED.chip, bandwidth=WANTED.chip.bandwidth / 6))
    engines = [search(wanted, 12, 2)[0].split.engine_devices for wanted in (fast, slow)]
    assert engines[1] > engines[0]


def test_a_model_that_fits_nowhere_is_refused_with_what_to_do():
    wanted = dataclasses.replace(WANTED, chip=dataclasses.replace(WANTED.chip, gib=4))
    with pytest.raises(UsageError, match="no split of 8 devices of 4 GiB fits"):
        search(wanted)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(families.derive_config(QWEN3_4B)))
    return tmp_path / "model"


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_command_line_of_one_host_is_that_of_a_run(tensor, model, tmp_path):
    best = next(one for one in search(WANTED, 100, 1) if one.split.tensor == tensor)
    (words,) = write_command(best, WANTED, Files(str(model), PROMPTS[1], run=str(tmp_path / "run")))
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", str(best.split.trainer_devices)]
    flags = [*words[words.index("pretrain_grpo.py") + 1 :], "--platform", "cpu", "--print-config"]
    settings = parse_run(shlex.join(flags), world_size=best.split.trainer_devices)
    sizes = settings.parallel_sizes
    assert (sizes.tensor, sizes.pipeline, sizes.context) == (best.split.tensor, best.split.pipeline, best.split.context)
    assert settings.sizes.division.slots_per_update == best.setting.slots
    assert settings.sizes.plan.num_replicas == best.split.replicas
    assert settings.rollout.num_engines == best.split.num_engines
    assert settings.rollout.tensor_parallel_size == best.split.engine_tensor
    assert settings.transformer.sequence_parallel == (tensor > 1)
    assert list_notes(best, WANTED) == []


def test_the_command_lines_of_several_hosts_are_the_sidecars_and_the_trainers(model, tmp_path, monkeypatch):
    wanted = dataclasses.replace(WANTED, num_devices=32, setting=dataclasses.replace(WANTED.setting, num_prompts=256))
    wanted = dataclasses.replace(wanted, adapters=TrainedAdapters.of(wanted.architecture, 8, True))
    best = search(wanted, 2, 1)[0]
    sidecar, trainer = write_command(best, wanted, Files(str(model), PROMPTS[1], run=str(tmp_path / "run")))
    read = sidecar_settings.parse([*sidecar[sidecar.index("megatron_rl.sidecar") + 1 :], "--platform", "cpu"])
    assert (read.rollout.num_engines, read.rollout.lora_rank) == (best.split.num_engines, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    # As the sidecar leaves it.
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "token").touch(mode=0o600)
    (tmp_path / "run" / "token").write_text("0" * 64)
    flags = [*trainer[trainer.index("pretrain_grpo.py") + 1 :], "--platform", "cpu", "--print-config"]
    launcher = trainer[: trainer.index("pretrain_grpo.py")]
    if best.split.trainer_devices > 8:
        assert launcher[launcher.index("--master-addr") :][:4] == ["--master-addr", "$MASTER", "--master-port", "29500"]
    assert ("--standalone" in launcher) == (best.split.trainer_devices <= 8)
    settings = parse_run(shlex.join(flags), world_size=best.split.trainer_devices)
    assert (settings.lora.rank, settings.publish.lora) == (8, "adapter")
    assert settings.sizes.plan.num_replicas == best.split.replicas
    notes = "\n".join(list_notes(best, wanted))
    assert "RUN and SHARED" in notes
    assert ("no run can have them yet" in notes) == (best.split.engine_devices > 8)


def test_a_schedule_that_is_only_compared_with_has_no_command_line():
    wanted = dataclasses.replace(WANTED, setting=dataclasses.replace(WANTED.setting, schedule="async"))
    with pytest.raises(UsageError, match="--schedule async is simulated for comparison only"):
        write_command(search(wanted, 1, 1)[0], wanted, Files("MODEL"))


def test_the_command_finds_a_split_draws_it_and_says_that_nothing_was_measured(model, tmp_path, capsys):
    out = tmp_path / "plan.png"
    words = ["--hf-model", str(model), "--devices", "8", "--simulate", "2", "--iterations", "1", "--recompute"]
    assert cli.main(["plan", *words, "--out", str(out)]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "tokens/s/device" in said
    assert "torchrun --standalone --nproc-per-node" in said
    assert "unreliable times: they come from data sheets" in said
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def folder(recorded, tmp_path, monkeypatch):  # noqa: F811
    """Write the files of a simulated run."""
    from tests.unit import test_planner_costs

    lines = {}
    read = test_planner_costs.read_record

    def keep(name, metrics, audit):
        lines["metrics"], lines["audit"] = metrics, audit
        return read(name, metrics, audit)

    monkeypatch.setattr(test_planner_costs, "read_record", keep)
    recorded(SETTING, Costs(BATCHING, TRAINER, publish=2.0), max_running=12, max_in_flight=24)
    for name, content in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    return tmp_path


def test_the_command_predicts_what_a_change_of_a_run_would_do(folder, tmp_path, capsys):
    run = f"{folder},max-num-seqs=12"
    assert cli.main(["plan", run, "--out", str(tmp_path / "plan.svg")]) == ExitCode.OK
    before = capsys.readouterr().out
    assert "a step 20 ms" in before
    assert "one run cannot show the error of a prediction" in before
    assert "unreliable" not in before
    assert (tmp_path / "plan.svg").exists()
    assert cli.main(["plan", run, "--rollout-num-engines", "8", "--grpo-prompts-per-step", "96"]) == ExitCode.OK
    after = capsys.readouterr().out
    assert "unreliable: 384 responses an iteration, and the runs cover 96" in after
    # What is appended may stand in the run's configuration.
    rollout = {"max_num_seqs": run_folder.Value("12", "a flag")}
    run_folder.write_saved_config(
        folder / run_folder.CONFIG_FILE, run_folder.SavedConfig(sections={"rollout": rollout})
    )
    assert cli.main(["plan", str(folder), "--out", str(tmp_path / "plan.svg")]) == ExitCode.OK
    assert capsys.readouterr().out == before
    # Two runs say how wrong they are about each other.
    other = folder.parent / "other"
    other.symlink_to(folder)
    assert cli.main(["plan", run, f"{other},max-num-seqs=12"]) == ExitCode.OK
    assert "each run, predicted from all others:" in capsys.readouterr().out


def test_engines_whose_script_has_step_seconds_are_predicted_from_them(folder, tmp_path, capsys):
    def save(in_flight: str) -> None:
        values = {"engine": "scripted", "script": str(script), "max_num_seqs": "12", "max_in_flight": in_flight}
        rollout = {name: run_folder.Value(text, "a flag") for name, text in values.items()}
        config = run_folder.SavedConfig(sections={"rollout": rollout})
        run_folder.write_saved_config(folder / run_folder.CONFIG_FILE, config)

    def plan(*words: str) -> str:
        code = cli.main(["plan", str(folder), *words])
        said = capsys.readouterr()
        return said.out if code == ExitCode.OK else said.err

    script = tmp_path / "script.json"
    save("24")
    assert f"--rollout-script {script} cannot be read" in (said := plan())
    assert "append ,engine=batching if their script had step_seconds, and ,engine=scripted if not" in said
    # Other costs than those of the run's times, so that these cannot have been fitted.
    script.write_text(json.dumps({"step_seconds": [0.04, 0.004]}))
    assert "a step 40 ms, and 4e+03 us a response, 0 ns" in (fixed := plan())
    assert "each engine is given" not in fixed
    save("auto")
    assert "each engine is given" in (chosen := plan())
    assert seconds_of(chosen, "periodic") <= seconds_of(fixed, "periodic")
    assert plan("--rollout-max-in-flight", "24") == fixed
    script.write_text(json.dumps({"tokens_per_second": 900}))
    assert "note: the sidecar chose how many responses were in flight" in plan()
    assert "or with scripted engines that have step_seconds: write N" in plan("--rollout-max-in-flight", "auto")


def seconds_of(said, schedule):
    (line,) = (line for line in said.splitlines() if line.startswith(f"{schedule} "))
    return float(line.split()[1])


def test_more_engines_and_faster_ones_shorten_what_waits_for_them(folder, capsys):
    found = []
    drafting = ["--draft-acceptance", "0.9", "--draft-tokens", "2"]
    for words in ([], ["--rollout-num-engines", "4"], ["--engine-speed", "2"], drafting):
        assert cli.main(["plan", f"{folder},max-num-seqs=12", *words]) == ExitCode.OK
        found.append(seconds_of(capsys.readouterr().out, "periodic"))
    assert found[1] < found[0]
    assert found[2] < found[0]
    assert not math.isclose(found[0], found[2])
    assert found[3] < found[0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["time"] |= {"drafted_tokens": 8, "accepted_tokens": 4, "accepted_length": 2.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["plan", f"{folder},max-num-seqs=12"]) == ExitCode.OK
    assert seconds_of(capsys.readouterr().out, "periodic") == found[0]
    assert cli.main(["plan", f"{folder},max-num-seqs=12", *drafting]) == ExitCode.USAGE
    assert "engines drafted in these runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--hf-model is missing: write a folder with config.json, or name a RUN"),
        (["--hf-model", "M", "--devices", "1"], "--devices 1 must be at least 2"),
        (["--hf-model", "M", "--devices", "8", "--out", "x.gif"], "--out x.gif: a picture ends with"),
        (["RUN,depth=3"], "depth must be one of stages"),
        (["RUN,stages=x"], "stages=x must be a whole number"),
        (["RUN,schedule=never"], "schedule=never must be one of"),
        (["FOLDER", "--engine-speed", "0"], "--engine-speed 0 must be a finite number above 0"),
        (["FOLDER", "--draft-acceptance", "1.5"], "--draft-acceptance 1.5 must be a share, from 0 to 1"),
        (["FOLDER", "--draft-acceptance", "0.5", "--draft-cost", "-1"], "--draft-cost -1 must be a finite number"),
        (["FOLDER", "--draft-acceptance", "0.5", "--draft-tokens", "0"], "--draft-tokens 0 must be at least 1"),
        ([*SEARCH, "--publish-lora", "adapter"], "--lora-rank must be at least 1"),
        (["FOLDER", "--grpo-group-size", "0"], "--grpo-group-size 0 must be at least 1"),
        (["FOLDER", "--response-length", "long"], "--response-length long must be"),
        (["FOLDER", "--reward-seconds", "-5"], "--reward-seconds -5 must be a finite number, at least 0"),
        (["FOLDER", "--reward-seconds", "nan"], "--reward-seconds nan must be a finite number, at least 0"),
        (["FOLDER", "--reward-seconds", "inf"], "--reward-seconds inf must be a finite number, at least 0"),
        (["FOLDER", "--turns", "0.5"], "--turns 0.5 must be a finite number, at least 1"),
        (["FOLDER", "--environment-seconds", "-1"], "--environment-seconds -1 must be a finite number, at least 0"),
        ([*SEARCH, "--reward-seconds", "nan"], "--reward-seconds nan must be a finite number, at least 0"),
        ([*SEARCH, "--response-length", "fixed:9000"], "--response-length reaches 9000 tokens, above --rollout-max-to"),
        ([*SEARCH, "--response-length", "uniform:1:8193"], "reaches 8193 tokens, above --rollout-max-tokens 8192"),
        ([*SEARCH, "--response-length", "lognormal:9000:0.5"], "reaches 9000 tokens, above --rollout-max-tokens 8192"),
        ([*SEARCH, "--response-length", "lognormal:900:0.5:9000"], "reaches 9000 tokens, above --rollout-max-tokens"),
        ([*SEARCH, "--prompt-length", "fixed:1025"], "--prompt-length reaches 1025 tokens, above --max-prompt-tokens"),
        (
            [*SEARCH, "--rollout-max-tokens", "40000"],
            "41024 tokens together, above the model's longest sequence, 40960",
        ),
    ],
)
def test_mistakes_name_the_flag_and_what_to_write(words, message, folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(families.derive_config(QWEN3_4B)))
    named = {"FOLDER": str(folder), "MODEL": str(tmp_path)}
    code = cli.main(["plan", *[named.get(word, word) for word in words]])
    assert code == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_a_tail_without_an_end_is_cut_where_the_run_cuts_it(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(families.derive_config(QWEN3_4B)))
    said = []
    for most in ("", ":2048"):
        words = [
            "--hf-model", str(tmp_path), "--devices", "8", "--rollout-max-tokens", "2048", "--simulate", "2",
            "--iterations", "1", "--grpo-prompts-per-step", "16", "--response-length", f"lognormal:1000:1{most}",
        ]  # fmt: skip
        assert cli.main(["plan", *words]) == ExitCode.OK
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["plan", str(tmp_path / "nothing")]) != ExitCode.OK
    assert "nothing" in capsys.readouterr().err
