"""A user-defined family is found by every process that reads its models, from its file alone."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_rl.algorithm.plug_ins import compare_plug_ins
from megatron_rl.command_line.describe import describe_own_files
from megatron_rl.commands.rescore import _read_fingerprint
from megatron_rl.config.hardware import read_free_memory
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.weights.families import describe_guest, read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar.vllm.server import configure_server
from tests import hf_models
from tests.command_lines import CPU, RUN, parse, parse_run
from tests.processes import ROOT

EXAMPLES = ROOT / "examples" / "families"
GUEST = f"{EXAMPLES}/ministral.py:MINISTRAL"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a model of Mistral, whose tensors have the names of Ministral's."""
    folder = hf_models.draw("mistral", tmp_path_factory.mktemp("models") / "ministral", num_hidden_layers=2)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "ministral"}))
    return folder


def test_the_architecture_names_the_file_so_that_its_tensors_are_found(folder: Path, tmp_path: Path) -> None:
    architecture = read_architecture(folder, GUEST)
    assert architecture.family == GUEST
    known = tmp_path / "known"
    known.mkdir()
    (known / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"model_type": "mistral"})
    )
    (known / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert dataclasses.replace(architecture, family="mistral") == read_architecture(known)
    assert Mapping(architecture).manifest() == Mapping(read_architecture(known)).manifest()
    assert _read_fingerprint(folder, GUEST) == _read_fingerprint(known)


def test_without_the_flag_the_error_names_it(folder: Path) -> None:
    with pytest.raises(InputError, match=r"model_type 'ministral' is not supported.*--weights-bridge FILE.py:NAME"):
        read_architecture(folder)


@pytest.mark.parametrize(
    ("guest", "message"),
    [
        (f"{EXAMPLES}/solar_open.py:SOLAR_OPEN", "describes models of model_type 'solar_open', and"),
        (f"{EXAMPLES}/ministral.py:MISTRAL", "has no Family MISTRAL; name one of MINISTRAL"),
        (f"{EXAMPLES}/ministral.py:STEM", "has no Family STEM; name one of MINISTRAL"),
        ("qwen3", "--weights-bridge qwen3 must name a family: write FILE.py:NAME"),
        ("/nowhere/mine.py:MINE", "/nowhere/mine.py cannot be read"),
    ],
)
def test_a_family_that_cannot_read_the_model_is_an_error(folder: Path, guest: str, message: str) -> None:
    with pytest.raises((InputError, UsageError)) as caught:
        read_architecture(folder, guest)
    assert message in str(caught.value)
    with pytest.raises((InputError, UsageError)) as caught:
        parse_run(*CPU, "--hf-model", str(folder), "--weights-bridge", guest, *RUN)
    assert message in str(caught.value)


def test_a_file_that_fails_is_named_with_its_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("\nMINE = Family()\n")
    with pytest.raises(UsageError, match=r"mine.py:2: NameError: name 'Family' is not defined; correct the file"):
        read_architecture(folder, f"{tmp_path}/mine.py:MINE")


def test_a_config_never_names_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('this file was run')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": f"{tmp_path}/mine.py:MINE"}))
    with pytest.raises(InputError, match="is not supported"):
        read_architecture(tmp_path)


def test_the_flag_reaches_the_settings_of_every_process(folder: Path, tmp_path: Path) -> None:
    words = ("--hf-model", str(folder), "--weights-bridge", GUEST)
    settings = parse(*CPU, *words)
    assert settings.architecture == read_architecture(folder, GUEST)
    engine = ("--rollout-engine", "scripted", "--rollout-folder", "/nowhere/run", "--reward", "exact")
    alone = sidecar_settings.parse([*words, *engine])
    sidecar_settings.write_message(tmp_path / "message", alone)
    received = sidecar_settings.read_settings([sidecar_settings.MESSAGE_FLAG, str(tmp_path / "message")])
    assert received.read_architecture() == settings.architecture


def test_a_changed_file_is_another_run(folder: Path) -> None:
    now = describe_own_files(parse(*CPU, "--hf-model", str(folder), "--weights-bridge", GUEST))
    assert now == describe_guest(GUEST)
    assert list(now) == [f"--weights-bridge {GUEST}"]
    with pytest.raises(InputError, match="the file has changed since"):
        compare_plug_ins(dict.fromkeys(now, "0" * 64), now, "iter_0000001")


def test_free_memory_is_that_of_the_host_or_of_its_control_group(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    assert read_free_memory(meminfo, group) is None
    meminfo.write_text("MemTotal:       64 kB\nMemAvailable:       40 kB\nHugePages_Total:       0\n")
    assert read_free_memory(meminfo, group) == 40 * 1024
    group.mkdir()
    for name, text in (("max", "max"), ("current", "9000"), ("stat", "anon 8000\ninactive_file 500\n")):
        (group / f"memory.{name}").write_text(text)
    assert read_free_memory(meminfo, group) == 40 * 1024
    (group / "memory.max").write_text("10000\n")
    assert read_free_memory(meminfo, group) == 10000 - 9000 + 500


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_engine_on_a_cpu_is_configured_for_a_model_that_only_the_file_knows(folder: Path, dtype: str | None) -> None:
    config = configure_server(RolloutConfig(dtype=dtype), folder, 64, "cpu", 1, weights_bridge=GUEST)
    assert (config.dtype, config.attends_plainly) == (dtype or "float32", False)
