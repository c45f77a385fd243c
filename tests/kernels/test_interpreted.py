"""The kernels in Triton's interpreter: the tests of the files `interpreted_*.py` beside this one."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.kernels.processes import run_module, run_to_end

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(900)]

FOLDER = Path(__file__).parent
# Models have ranks of their own.
OF_MODELS = ("interpreted_batch_invariant_mode", "interpreted_models")
NAMES = sorted({path.stem for path in FOLDER.glob("interpreted_*.py")} - {*OF_MODELS})


@dataclasses.dataclass(frozen=True)
class Ran:
    """The outcome of the files' tests."""

    passed: dict[str, list[bool]]
    """A flag for each test, by file."""
    output: str


@pytest.fixture(scope="session")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run the files that were selected.

    They have a process of their own, because Triton decides whether to interpret when it is first imported. It is one
    process for all, because its imports take longer than many of the tests.
    """
    of_this = [item for item in request.session.items if item.path == Path(__file__)]
    selected = sorted({item.callspec.params["name"] for item in of_this})
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    words = ("-q", "-m", "not slow", f"--junitxml={report}", *(str(FOLDER / f"{name}.py") for name in selected))
    done = run_to_end("pytest", *words, TRITON_INTERPRET="1")
    passed: dict[str, list[bool]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        passed.setdefault(case.attrib["classname"].split(".")[-1], []).append(len(case) == 0)
    return Ran(passed, done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_compute_what_their_naive_twins_do(name: str, ran: Ran) -> None:
    assert ran.passed.get(name), ran.output
    assert all(ran.passed[name]), ran.output


@pytest.mark.slow
def test_slow_tests_of_interpreted_kernels_pass() -> None:
    files = [str(FOLDER / f"{name}.py") for name in NAMES]
    done = run_to_end("pytest", "-q", "-m", "slow", *files, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("interpreted_batch_invariant_mode", ""),
        ("interpreted_models", "few"),
        pytest.param("interpreted_models", "more or heads", marks=pytest.mark.slow),
    ],
)
def test_models_with_interpreted_kernels_are_those_of_transformers(name: str, tests: str) -> None:
    run_module("pytest", "-q", "-k", tests, str(FOLDER / f"{name}.py"), TRITON_INTERPRET="1")
