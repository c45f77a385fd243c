"""An extra's packages are enough for a run over scripted engines, for the doctor, and for a report.

Each environment holds the packages that the metadata of this project and of all its packages require, and nothing else.
"""

from pathlib import Path

import pytest

from tests import extras
from tests.e2e import loop
from tests.ranks import free_port

pytestmark = pytest.mark.each_change

# Packages that this machine's environment lacks: vLLM's build for CUDA, and those whose builds do not load beside the
# CPU build of torch.
LEFT_OUT = {"cpu": {"torchvision", "torchaudio", "torchcodec"}, "cuda": {"vllm"}, "report": set()}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("extras"))


@pytest.fixture(scope="module")
def requirements(tmp_path_factory):
    return extras.read_requirements(tmp_path_factory.mktemp("metadata"))


def install(requirements, extra: str, folder: Path) -> Path:
    names, missing = extras.find_closure(requirements, [extra])
    assert missing == LEFT_OUT[extra]
    return extras.make_environment(folder / extra, names)


def run_with(python: Path, world: loop.World, name: str) -> Path:
    """Run an iteration in an environment, and its doctor; return the run's folder."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    words = world.words(name, train_iters=1, rollout_num_engines=1)
    done = extras.run(python, str(loop.SCRIPT), *words, **place, MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    # The doctor's line for the platform that runs here.
    assert_usable(extras.run(python, "-m", "megatron_rl.cli", "doctor", "--platform", "cpu"))
    return world.folder / "runs" / name


@pytest.mark.slow
def test_the_extra_cpu_brings_all_that_a_run_imports(world, requirements, tmp_path):
    run_with(install(requirements, "cpu", tmp_path), world, "cpu")


# The smaller of the two stands for both: see the next test.
def test_the_extra_cuda_brings_all_that_a_run_imports_and_the_extra_report_all_of_a_report(
    world, requirements, tmp_path
):
    folder = run_with(install(requirements, "cuda", tmp_path), world, "cuda")
    python = install(requirements, "report", tmp_path)
    done = extras.run(python, "-m", "megatron_rl.cli", "report", str(folder), "--out", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "report.html").read_text()[:2000]


def test_the_extra_cpu_has_all_packages_of_the_extra_cuda_that_this_machine_has(requirements):
    of_cpu, of_cuda = (extras.find_closure(requirements, [extra])[0] for extra in ("cpu", "cuda"))
    assert of_cuda.items() <= of_cpu.items()


def assert_usable(done) -> None:
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "usable"
