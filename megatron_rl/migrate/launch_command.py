"""The reader of another project's launch script: the words, overrides or settings that it gives its run."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_rl.command_line.other_projects import read_values, split_words
from megatron_rl.errors import InputError
from megatron_rl.migrate.shell_script import read_shell_script

# Programs whose words after the script or module are the run's.
_LAUNCHERS = ("torchrun", "python", "python3", "ray", "accelerate", "trl", "msrun", "deepspeed", "srun", "nohup", "uv")
# The classes of TRL whose keywords are settings, each with the settings whose keywords have other names.
TEACHER = "teacher_model_name_or_path"
"""TRL's setting that names the teacher, which only its distillation has."""
STAGE = "trl_stage"
"""The name of TRL's trainer, if that is another one than GRPOTrainer, among its settings."""
_CLASSES: Mapping[str, Mapping[str, str]] = {
    "GRPOConfig": {},
    "GRPOTrainer": {"model": "model_name_or_path"},
    "DistillationConfig": {},
    "DistillationTrainer": {"model": "model_name_or_path", "teacher_model": TEACHER},
    "DPOConfig": {},
    "DPOTrainer": {"model": "model_name_or_path"},
}
_DATA = ("train_dataset", "eval_dataset")
_OBJECTS = ("args", "model_name_or_path", "processing_class")


def find_command(script: Path, text: str, arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Find the command of a shell script that starts a run: the launcher's words, the run's, and missing files."""
    variables = {"0": str(script), "BASH_SOURCE": str(script)}
    read = read_shell_script(text, variables, arguments, functools.partial(_read_beside, script))
    found = next(filter(None, map(_split_command, read.commands)), None)
    if found is None:
        raise InputError(
            f"{script} starts no run that is known: write a script of slime, Megatron-LM, verl, NeMo-RL or TRL"
        )
    return *found, read.missing


def _read_beside(script: Path, path: str) -> str | None:
    """Read a file that a script sources: by its path, or beside the script."""
    for file in (Path(path), script.parent / path):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _split_command(command: list[str]) -> tuple[list[str], list[str]] | None:
    """Return the launcher's words and the run's, if a command starts a run."""
    if command[0].rsplit("/", 1)[-1] not in _LAUNCHERS:
        return None
    for at, word in enumerate(command[1:], 1):
        if (
            word.endswith(".py")
            or (command[at - 1] == "-m" and "." in word)
            or (command[0] == "trl" and word in ("grpo", "dpo"))
        ):
            return command[: at + 1], command[at + 1 :]
    return None


def read_overrides(words: Sequence[str]) -> dict[str, str]:
    """Read Hydra's overrides: key=value, with + before a new key."""
    pairs = (word.lstrip("+~").partition("=") for word in words if "=" in word and not word.startswith("--"))
    return {key: value.strip("'\"") for key, _, value in pairs}


def read_switches(words: Sequence[str]) -> dict[str, str]:
    """Read --key value and --key=value, with dashes as underscores; a key without a value is on."""
    settings: dict[str, str] = {}
    for name, values in group_words(words):
        settings[name.removeprefix("--").replace("-", "_")] = " ".join(values) or "true"
    return settings


def read_flat_yaml(text: str) -> dict[str, str]:
    """Read `key: value` lines, and lists with an item a line; nested settings are not TRL's, and are skipped."""
    settings: dict[str, str] = {}
    key = ""
    for line in filter(None, (re.sub(r"(^|\s)#.*", "", line).rstrip() for line in text.splitlines())):
        pair = re.fullmatch(r"([A-Za-z_]\w*):\s*(.*)", line)
        item = re.fullmatch(r"\s*-\s+([^:]*)", line)
        if pair is not None:
            key = pair[1]
            settings |= {key: pair[2].strip("'\"")} if pair[2] else {}
        elif item is not None and key:
            settings[key] = " ".join(filter(None, [settings.get(key), item[1].strip("'\"")]))
        else:
            key = ""
    return settings


def read_program(text: str, script: Path) -> dict[str, str]:
    """Read the keywords that a program passes to a class of TRL's settings, and the models that it passes a trainer."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{script} is not Python ({error}): write TRL's program") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_called(node) in _CLASSES]
    if not calls:
        raise InputError(
            f"{script} is a program that calls none of TRL's {', '.join(_CLASSES)}: write the script that starts the "
            "run, or a program of TRL that trains with GRPO or DPO, or distils"
        )
    settings = {}
    for call in calls:
        if _name_called(call).startswith("DPO"):
            settings[STAGE] = "dpo"
        for keyword in call.keywords:
            key = _CLASSES[_name_called(call)].get(keyword.arg or "", keyword.arg or "")
            if isinstance(keyword.value, ast.Constant):
                settings[key] = str(keyword.value.value)
            elif key == "reward_funcs":
                settings[key] = " ".join(_find_functions(tree, keyword.value, script))
            elif key in _DATA:
                settings[key] = _find_rows(tree, keyword.value)
            elif key not in _OBJECTS:
                text = ast.unparse(keyword.value)
                settings[key] = f"<{text}>" if key == "ref_model" else text
    return settings


def _find_functions(tree: ast.Module, value: ast.expr, script: Path) -> Iterator[str]:
    """Yield the reward functions of a program as FILE.py:NAME, or by their name if importing the file would train.

    A function without a name is yielded as a text that has no blank.
    """
    is_guarded = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
    files = {node.name: script for node in tree.body if isinstance(node, ast.FunctionDef) and is_guarded}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            file = script.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            files |= {alias.name: file for alias in node.names if file.is_file() and alias.asname is None}
    value = _find_assigned(tree, value)
    for item in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        if isinstance(item, ast.Call):
            yield f"{_name_called(item)}(...)"
        elif isinstance(item, ast.Name | ast.Attribute | ast.Constant):
            name = ast.unparse(item)
            yield f"{files[name]}:{name}" if name in files else name
        else:
            yield f"<{type(item).__name__.lower()}>"


def _find_rows(tree: ast.Module, value: ast.expr) -> str:
    """Return the file of a data set that is read from one, or the expression that makes the data set."""
    value = _find_assigned(tree, value)
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "data_files" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ast.unparse(value)


def _find_assigned(tree: ast.Module, value: ast.expr) -> ast.expr:
    """Return the expression that a variable is assigned, if it is assigned once; any other value as it is."""
    if not isinstance(value, ast.Name):
        return value
    assigned = [node.value for node in ast.walk(tree)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id]  # fmt: skip
    return assigned[0] if len(assigned) == 1 else value


def _name_called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def read_launcher(words: Sequence[str]) -> dict[str, str]:
    """Read a launcher's flags, each with one value; further words are the program's."""
    return {name.strip("-").replace("-", "_"): (values or [""])[0] for name, values in group_words(words)}


def group_words(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that follow it."""
    return (read_values(flag) for flag in split_words(words) if flag[0].startswith("--"))
