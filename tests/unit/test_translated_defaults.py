"""Every default of other projects, from their sources, is carried over by `megatron-rl translate`, or named."""

import dataclasses
import functools
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.command_line.parse import RunSettings, parse_run
from megatron_rl.migrate import translate
from megatron_rl.migrate.shell_script import read_shell_script
from megatron_rl.migrate.translation import Translation, index_flags, read_table
from tests.command_lines import PROMPTS, QWEN3, folder, keep_one_parser
from tests.documents import read

FILE = Path(__file__).parents[1] / "golden" / "translated_defaults.toml"
ROWS: Mapping[str, Any] = tomllib.loads(FILE.read_text())
KINDS = ("carried", "same", "named", "refused", "meaningless")
ADDED = f"--reward exact {shlex.join(PROMPTS)} --train-iters 10 --rollout-folder run"
# The least that a script of each project says; {model} is the folder of a model.
SCRIPTS = {
    "verl": (
        "run.sh",
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={model} {besides} "
        "algorithm.adv_estimator={estimator} actor_rollout_ref.rollout.n={group}",
    ),
    "slime": (
        "run.sh",
        "python3 train.py --actor-num-gpus-per-node 4 --hf-checkpoint {model} --prompt-data {prompts} "
        "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 10 --rollout-max-response-len 64 {besides}",
    ),
    "nemo": ("run.sh", "uv run examples/run_grpo.py --config config.yaml {besides}"),
    "trl": ("grpo.yaml", "model_name_or_path: {model}\nnum_processes: 2\n{besides}\n"),
}


# The sections of NeMo-RL's config that have no defaults, as far as a run needs them.
CONFIG = """
policy:
  model_name: {model}
  train_global_batch_size: 64
  max_total_sequence_length: 128
  max_grad_norm: 1.0
  megatron_cfg: {{enabled: true, optimizer: {{optimizer: adam, lr: 1e-6}}, scheduler: {{lr_decay_style: constant}}}}
  generation: {{max_new_tokens: 64, temperature: 1.0, colocated: {{enabled: false}}}}
teacher: {{model_name: {model}}}
value: {{model_name: "${{policy.model_name}}"}}
cluster: {{gpus_per_node: 2, num_nodes: 1}}
"""


@dataclasses.dataclass
class Translated:
    """A translated script, and the output of our own parser for it."""

    translation: Translation
    problems: list[str]
    settings: RunSettings | None

    def look_up(self, target: str) -> object:
        subject, _, field = target.partition(".")
        value = getattr(getattr(self.settings, subject), field)
        return "None" if value is None else value

    def has_flag_of(self, target: str) -> bool:
        return any(target in index_flags()[name].targets for name in self.translation.words)


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def run_translate(project: str, besides: str, at: Path) -> Translated:
    """Translate a script of this project, and parse the command that is printed."""
    name, text = SCRIPTS[project]
    at.mkdir(exist_ok=True)
    model = folder(at, dataclasses.replace(QWEN3, max_position_embeddings=4096))
    script = at / name
    estimator = "gae" if "adv_estimator=gae" in besides else "grpo"
    group = "1" if "rollout.n=1" in besides else "8"
    script.write_text(text.format(model=model, prompts=PROMPTS[1], besides=besides, estimator=estimator, group=group))
    (at / "config.yaml").write_text(CONFIG.format(model=model))
    found = translate.translate(script)
    added = dict(translate.group_words(shlex.split(ADDED)))
    if "--stage" in found.words:
        # Neither fine-tuning nor preferences have rewards.
        del added["--reward"]
    found.words = added | found.words
    problems = translate.find_problems(found)
    printed = read_shell_script(translate.write(found, problems)).commands[0]
    words = printed[printed.index("pretrain_grpo.py") + 1 :]
    settings = None if problems else parse_run(words, world_size=found.nodes * found.ranks)
    return Translated(found, problems, settings)


@pytest.mark.parametrize("project", SCRIPTS)
def test_every_default_of_the_table_is_carried_over_or_named(project: str, tmp_path: Path) -> None:
    run = functools.cache(functools.partial(run_translate, project, at=tmp_path / "run"))
    wrong = []
    for kind in KINDS[:4]:
        for key, (_, *expected) in ROWS[project][kind].items():
            besides = expected.pop() if len(expected) > (2 if kind in ("carried", "same") else 1) else ""
            found = run(besides)
            if kind in ("carried", "same"):
                target, value = expected
                got = found.problems or found.look_up(target)
                if got != value or (not besides and found.has_flag_of(target) != (kind == "carried")):
                    wrong.append((key, kind, got, value))
            else:
                texts = found.translation.changed if kind == "named" else found.problems
                if not any(expected[0] in text for text in texts):
                    wrong.append((key, kind, texts, expected[0]))
    assert wrong == []


@pytest.mark.parametrize("project", ["verl", "nemo", "trl"])
def test_the_table_has_every_default_that_is_translated(project: str) -> None:
    listed = {key: row[0] for kind in KINDS for key, row in ROWS[project][kind].items()}
    assert listed == read_table(project)["defaults"]


def list_written(project: str) -> str:
    """Return every default of a project, as a script of it would write them."""
    rows = [(key, row[0]) for kind in ("carried", "same") for key, row in ROWS[project][kind].items() if len(row) == 3]
    if project in ("verl", "nemo"):
        return " ".join(f"'{key}={value}'" for key, value in rows)
    if project == "trl":
        return "\n".join(f"{key}: {value}" for key, value in rows)
    return " ".join(f"{key} {value}" for key, value in rows if value not in ("off", "none") and value[0] != "-")


@pytest.mark.parametrize("project", SCRIPTS)
def test_defaults_that_are_written_give_the_command_of_those_that_are_not(project: str, tmp_path: Path) -> None:
    silent, written = (run_translate(project, text, tmp_path / "run") for text in ("", list_written(project)))
    assert silent.settings is not None
    assert written.settings is not None
    for subject in ("algorithm", "training", "schedule", "sampling", "evaluation", "data", "rollout", "optimizer"):
        assert getattr(silent.settings, subject) == getattr(written.settings, subject)
    assert written.translation.changed == silent.translation.changed


def test_the_page_has_the_counts_of_the_table() -> None:
    page = read("docs/recipes.md")
    for project, title in (("verl", "verl"), ("slime", "slime"), ("nemo", "NeMo-RL"), ("trl", "TRL")):
        counts = [len(ROWS[project][kind]) for kind in KINDS]
        row = " | ".join((f"| {title} {ROWS[project]['version']}", str(sum(counts)), *map(str, counts)))
        assert f"{row} |" in page
