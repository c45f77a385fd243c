"""The manifests that a launch prints follow Kubernetes' own schemas, and a linter accepts the Dockerfiles."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from megatron_rl.cli import main as megatron_rl
from tests.command_lines import LAUNCHED
from tests.processes import ROOT

RELEASES = ["1.30", kubernetes_validate.latest_version()]
DOCKERFILES = sorted((ROOT / "docker").glob("*Dockerfile"))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return all objects of a launch, the secret included."""
    folder = tmp_path_factory.mktemp("launch")
    words = ["--dry-run", "--out", str(folder), "--engine-hosts", "2", "--image", "i:1", "--claim", "shared:/shared"]
    assert megatron_rl(["launch", "kubernetes", *words, "--", *LAUNCHED, "/shared/run"]) == 0
    return [one for name in ("secret", "run") for one in yaml.safe_load_all((folder / f"{name}.yaml").read_text())]


@pytest.mark.parametrize("release", RELEASES)
def test_each_object_follows_its_schema(objects, release):
    kinds = [one["kind"] for one in objects]
    assert kinds == ["Secret", "Service", "ConfigMap", "StatefulSet", "Job"]
    for one in objects:
        kubernetes_validate.validate(one, release, strict=True)


def pod(one: dict[str, Any]) -> dict[str, Any]:
    return one["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "plant",
    [
        lambda engines: engines["spec"].update(replicas="2"),
        lambda engines: engines["spec"].update(serviceNames=engines["spec"].pop("serviceName")),
        lambda engines: engines["spec"].pop("selector"),
        lambda engines: pod(engines)["containers"][0].update(command="bash -c true"),
        lambda engines: pod(engines)["volumes"][0]["projected"].update(defaultMode="0400"),
        lambda engines: pod(engines)["containers"][0]["readinessProbe"].update(httpPath="/health"),
    ],
)
def test_a_planted_fault_is_found(objects, plant: Callable[[Any], object]):
    engines = copy.deepcopy(next(one for one in objects if one["kind"] == "StatefulSet"))
    plant(engines)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(engines, RELEASES[0], strict=True)


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.prefix, "bin", "hadolint")
    return subprocess.run([program, "--no-color", path], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_accepts_each_dockerfile(path, tmp_path):
    found = lint(path)
    assert (found.returncode, found.stdout) == (0, "")
    planted = tmp_path / "Dockerfile"
    planted.write_text(path.read_text().replace("python:3.12-slim-bookworm", "python:latest"))
    assert "DL3007" in lint(planted).stdout
