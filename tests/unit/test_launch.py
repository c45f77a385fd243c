"""megatron-rl launch: what a scheduler is given, what is refused, and that no token is in what others can read."""

import dataclasses
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_rl.cli import main as megatron_rl
from megatron_rl.errors import ExitCode
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.shared.weights import families
from megatron_rl.sidecar.agent.main import removed_afterwards
from megatron_rl.sidecar.hosts import HostPlace
from megatron_rl.sidecar.hosts.sources import AlikeHosts, KubernetesHosts, SlurmHosts, read_alike
from tests.command_lines import LAUNCHED, QWEN3, without
from tests.documents import commands_of
from tests.processes import ROOT


def draw_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(families.derive_config(dataclasses.replace(QWEN3, max_position_embeddings=2048)))
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(scheduler: str, *words: str, save: str = "runs/maths") -> int:
    flags = ["--trainer-hosts", "2", "--engine-hosts", "3", *words]
    return megatron_rl(["launch", scheduler, *flags, "--", *LAUNCHED, save])


def read_hosts(folder: Path, kind: str) -> AlikeHosts:
    return read_alike(f"{kind}:{folder / 'hosts.toml'}", {"slurm": SlurmHosts, "kubernetes": KubernetesHosts}[kind], 2)


def find_words(script: str, program: str) -> list[str]:
    """Return the words of the one shell command that has this program, with all that the shell would replace."""
    (line,) = (line for line in script.replace("\\\n", " ").splitlines() if program in line)
    words = shlex.split(line)
    return shlex.split(words[words.index("-c") + 1])


def test_a_job_of_slurm_has_ranks_in_its_first_component_and_agents_in_its_second(place, capsys):
    assert launch("slurm", "--dry-run", "--sbatch=--partition=gpu", "--engine-sbatch=--constraint=old") == 0
    folder = place / "runs/maths/rollout/maths/launch"
    script = (folder / "job.sh").read_text()
    printed = capsys.readouterr().out
    assert script in printed
    assert "nothing was started: sbatch" in printed
    subprocess.run(["bash", "-n", str(folder / "job.sh")], check=True)
    both = "--ntasks-per-node=1 --exclusive --mem=0 --gpus-per-node=8 --partition=gpu"
    first, second = script.split("#SBATCH hetjob\n")
    assert f"#SBATCH --nodes=2 {both}\n" in first
    assert f"#SBATCH --nodes=3 --no-kill {both} --constraint=old\n" in second
    ranks = find_words(script, "torch.distributed.run")
    assert ranks[4:14] == [
        "--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "$SLURM_PROCID", "--master-addr", "$first",
        "--master-port", "29400",
    ]  # fmt: skip
    assert ranks[14:] == [
        *LAUNCHED, "runs/maths", "--rollout-hosts", "slurm", "--rollout-num-engines", "0",
        "--rollout-listen", "0.0.0.0:7099",
    ]  # fmt: skip
    agent = find_words(script, "megatron_rl.sidecar.agent")
    assert agent[agent.index("--listen") + 1] == "$SLURMD_NODENAME:7100"
    assert Path(agent[agent.index("--token-file") + 1]) == folder / "token"
    found = read_hosts(folder, "slurm")
    assert (found.port, found.every) == (7100, HostPlace("", 4, (0, 1, 2, 3, 4, 5, 6, 7)))
    # The trainer refuses a folder that others can read.
    assert (place / "runs/maths/rollout/maths").stat().st_mode & 0o077 == 0
    assert (folder / "token").stat().st_mode & 0o077 == 0
    assert found.token not in script + printed


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
@pytest.mark.parametrize("head", ["pretrain_grpo.py", "-m megatron_rl"])
def test_words_that_the_run_would_refuse_start_nothing(place, capsys, scheduler, head):
    image = ["--image", "image"] if scheduler == "kubernetes" else []
    words = [*head.split(), "--hf-modle", "model", "--save", "runs/maths"]
    assert megatron_rl(["launch", scheduler, "--engine-hosts", "1", *image, "--", *words]) == ExitCode.USAGE
    errors = capsys.readouterr().err
    assert "unknown flag --hf-modle (the nearest is --hf-model)" in errors
    for flag in ("--prompts", "--reward", "--lr", "--train-iters", "--seq-length", "--grpo-prompts-per-step"):
        assert f"megatron-rl launch: {flag} is missing" in errors
    assert list(place.iterdir()) == []
    assert megatron_rl(["launch", scheduler, "--engine-hosts", "1", *image]) == ExitCode.USAGE
    assert "the trainer's command is missing: write megatron-rl launch SCHEDULER" in capsys.readouterr().err
    for start in (["torchrun"], ["python", "-m", "torch.distributed.run"]):
        assert megatron_rl(["launch", scheduler, "--engine-hosts", "1", *image, "--", *start, *words]) == ExitCode.USAGE
        assert f"{start[0]} must not stand after --" in capsys.readouterr().err


def test_files_of_the_run_are_checked_if_its_model_is_on_this_machine(place, capsys):
    assert launch("slurm", "--dry-run") == ExitCode.OK
    assert "my model is not on this machine: only flags were checked" in capsys.readouterr().err
    named = [*without(LAUNCHED, "--reward"), "runs/maths", "--reward", "exakt"]
    assert megatron_rl(["launch", "slurm", "--engine-hosts", "3", "--dry-run", "--", *named]) == ExitCode.USAGE
    assert "--reward exakt must be FILE.py:FUNCTION or one of" in capsys.readouterr().err
    draw_config(place / "my model")
    assert launch("slurm", "--dry-run") == ExitCode.USAGE
    assert "--prompts prompts.jsonl does not exist" in capsys.readouterr().err
    (place / "prompts.jsonl").touch()
    assert launch("slurm", "--dry-run") == ExitCode.OK
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [["-m", "megatron_rl.recipe", "pretrain_gpt.py"], ["my_script.py", "--depth", "3"]])
def test_words_of_other_programs_are_left_to_them(place, words):
    flags = ["--engine-hosts", "1", "--dry-run"]
    assert megatron_rl(["launch", "slurm", *flags, "--", *words, "--save", "runs/maths"]) == ExitCode.OK


def test_the_examples_of_the_documents_are_complete(place, capsys):
    commands = [words for words in commands_of("docs/hosts.md") if words.startswith("megatron-rl launch")]
    assert len(commands) == 2
    for command in commands:
        words = [word.replace("/shared", str(place)) for word in shlex.split(command)[1:]]
        mark = words.index("--")
        assert megatron_rl([*words[:mark], "--dry-run", *words[mark:]]) == ExitCode.OK, capsys.readouterr().err


def test_an_engine_over_several_hosts_has_its_share_of_each(place, capsys):
    assert launch("slurm", "--dry-run", "--engine-hosts", "4", "--hosts-per-engine", "2") == 0
    found = read_hosts(place / "runs/maths/rollout/maths/launch", "slurm")
    assert (found.hosts_per_engine, found.every.engines, found.every.devices) == (2, 8, (0, 1, 2, 3, 4, 5, 6, 7))
    assert launch("slurm", "--dry-run", "--hosts-per-engine", "2") == ExitCode.USAGE
    assert "--hosts-per-engine 2 must divide --rollout-tensor-parallel-size 2 and" in capsys.readouterr().err


def test_the_manifests_name_each_other_and_the_secret_alone_has_the_token(place, capsys):
    assert launch("kubernetes", "--dry-run", "--image", "images/megatron-rl:1", "--claim", "shared:/shared") == 0
    folder = place / "maths-launch"
    text = (folder / "run.yaml").read_text()
    printed = capsys.readouterr().out
    assert text in printed
    service, settings, engines, trainer = yaml.safe_load_all(text)
    (secret,) = yaml.safe_load_all((folder / "secret.yaml").read_text())
    found = read_hosts(folder, "kubernetes")
    assert secret["stringData"]["token"] == found.token
    assert found.token not in text + printed
    assert (folder / "secret.yaml").stat().st_mode & 0o077 == 0
    assert settings["data"]["hosts.toml"] == (folder / "hosts.toml").read_text()
    # The names at which the sidecar looks are those that the StatefulSet and its Service give.
    name, spec = engines["metadata"]["name"], engines["spec"]
    assert spec["serviceName"] == service["metadata"]["name"]
    assert found.which.list_names() == [f"{name}-{number}.{spec['serviceName']}" for number in range(spec["replicas"])]
    for part in (engines, trainer):
        template = part["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        check_pod(template["spec"], secret["metadata"]["name"], settings["metadata"]["name"])
    assert service["spec"]["clusterIP"] == "None"
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    ranks = trainer["spec"]["template"]["spec"]
    words = shlex.split(ranks["containers"][0]["command"][-1])
    first = words[words.index("--master-addr") + 1]
    assert first == f"{trainer['metadata']['name']}-0.{ranks['subdomain']}"
    assert ranks["subdomain"] == service["metadata"]["name"]
    assert trainer["spec"]["completions"] == trainer["spec"]["parallelism"] == int(words[words.index("--nnodes") + 1])


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
def test_an_agent_listens_at_the_address_of_its_pod(place, tmp_path, address):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o700)
    assert launch("kubernetes", "--dry-run", "--image", "image", "--python", str(python)) == 0
    _, _, engines, _ = yaml.safe_load_all((place / "maths-launch" / "run.yaml").read_text())
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    run = subprocess.run(
        container["command"], env=os.environ | {"POD_IP": address}, check=True, capture_output=True, text=True
    )
    words = run.stdout.split("\n")
    assert parse_place(words[words.index("--listen") + 1]) == (address, 7100)


def test_the_example_is_what_its_command_prints(place):
    example = (ROOT / "examples" / "kubernetes" / "maths.yaml").read_text()
    comment, _, manifests = example.partition("\n---\n")
    words = shlex.split(comment.replace("\\\n#", " ").partition("megatron-rl ")[2])
    assert megatron_rl(words) == 0
    assert (place / "maths-launch" / "run.yaml").read_text() == manifests


def check_pod(pod: dict[str, Any], secret: str, settings: str) -> None:
    """Check that all that a container mounts exists, and that only the container's user can read the token."""
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/etc/megatron_rl", "/dev/shm", "/shared"}
    hosts = volumes["hosts"]["projected"]
    assert hosts["sources"] == [{"secret": {"name": secret}}, {"configMap": {"name": settings}}]
    assert hosts["defaultMode"] & 0o077 == 0
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_the_program_of_the_scheduler_is_given_the_files(place, monkeypatch, capfd):
    for program in ("sbatch", "kubectl"):
        path = place / program
        path.write_text('#!/bin/sh\necho "$0 $@" >&2\nexit 0\n')
        path.chmod(0o700)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    assert launch("slurm") == 0
    assert f"sbatch {place}/runs/maths/rollout/maths/launch/job.sh\n" in capfd.readouterr().err
    assert launch("kubernetes", "--image", "image") == 0
    folder = place / "maths-launch"
    assert f"kubectl apply -f {folder}/secret.yaml -f {folder}/run.yaml\n" in capfd.readouterr().err
    (place / "kubectl").write_text("#!/bin/sh\nexit 3\n")
    assert launch("kubernetes", "--image", "image") == ExitCode.ENVIRONMENT
    assert "has failed with exit code 3" in capfd.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert launch("slurm") == ExitCode.ENVIRONMENT
    assert "sbatch is not found here: run sbatch" in capfd.readouterr().err


def test_all_mistakes_of_a_launch_are_named_at_once_and_nothing_is_written(place, capsys):
    words = ["--name", "My_Run", "--engines-per-host", "5", "--port", "65535", "--source", "none"]
    others = ["pretrain_grpo.py", *without(LAUNCHED[1:-1], "--lr"), "--rollout-hosts", "slurm"]
    assert megatron_rl(["launch", "slurm", *words, "--", *others]) == ExitCode.USAGE
    note, *errors = capsys.readouterr().err.splitlines()
    assert "my model is not on this machine" in note
    expected = (
        "--rollout-hosts must not be given after --", "--rollout-folder is missing after --", "--lr is missing",
        "--name My_Run must have", "--engine-hosts 0 must be at least 1",
        "--engines-per-host 5 with 2 accelerators each", "--port 65535 must be", "--source none must be a file",
    )  # fmt: skip
    assert len(errors) == len(expected), errors
    for error, words_of_error in zip(errors, expected, strict=True):
        assert f"megatron-rl launch: {words_of_error}" in error
    assert launch("slurm", "--engines-per-host", "5") == ExitCode.USAGE
    assert "--engines-per-host 5 with 2 accelerators each must not need more than the 8" in capsys.readouterr().err
    assert launch("kubernetes", "--claim", "shared:runs") == ExitCode.USAGE
    errors = capsys.readouterr().err
    assert "--claim shared:runs must be CLAIM:FOLDER" in errors
    assert "--image is missing" in errors
    assert megatron_rl(["launch", "pbs"]) == ExitCode.USAGE
    assert list(place.iterdir()) == []


def test_what_a_user_writes_is_read_back_from_the_manifests_as_it_was(place):
    odd = """a 'b' "c": {d} # @e $f \\g"""
    claim = odd.replace(":", "")
    flags = ["--name", "no", "--image", odd, "--namespace", "no", "--resource", odd, "--claim", f"{claim}:/shared"]
    assert launch("kubernetes", "--dry-run", *flags, save=odd) == ExitCode.OK
    *_, engines, trainer = yaml.safe_load_all((place / "no-launch" / "run.yaml").read_text())
    pod = trainer["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert odd in shlex.split(container["command"][-1])
    assert (container["image"], container["resources"]["limits"]) == (odd, {odd: 8})
    assert pod["volumes"][-1]["persistentVolumeClaim"]["claimName"] == claim
    assert (engines["spec"]["serviceName"], engines["metadata"]["namespace"]) == ("no", "no")


def test_folders_are_removed_though_all_processes_are_told_to_end(tmp_path):
    folder = tmp_path / "left"
    folder.mkdir()
    others = set(psutil.Process().children())
    with removed_afterwards(folder):
        (guard,) = set(psutil.Process().children()) - others
        while not guard.children():
            pass
        for process in (*guard.children(), guard):
            process.terminate()
    assert not folder.exists()
