"""megatron-rl translate: the command line of this package for a run of slime, Megatron-LM, verl or TRL."""

import argparse
import ast
import dataclasses
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.arguments import flags
from megatron_rl.commands.shell_script import read_shell_script
from megatron_rl.config.flag import Flag, Kind, index_by_name
from megatron_rl.errors import ExitCode, InputError
from megatron_rl.platforms import select

_FILE = Path(__file__).with_name("translations.toml")
# Programs whose words after the script or module are the run's.
_LAUNCHERS = ("torchrun", "python", "python3", "ray", "accelerate", "trl", "msrun", "deepspeed", "srun", "nohup", "uv")
_WIDTH = 100


@dataclasses.dataclass
class Translation:
    """A command line, and what it leaves out."""

    source: str
    """The project that it was written for."""
    words: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Our flags, each with its values."""
    ranks: int | None = None
    lost: list[str] = dataclasses.field(default_factory=list)
    """What could not be carried over, each with its reason."""
    unsaid: list[str] = dataclasses.field(default_factory=list)
    """Settings that need no flag here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the command line that a script is translated to, and what could not be carried over."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl translate",
        description="Prints the command line of this package for a run of slime, Megatron-LM, verl or TRL.",
    )
    parser.add_argument("script", type=Path, help="a launch script (.sh), or TRL's settings (.yaml or .py)")
    parser.add_argument("arguments", nargs="*", help="what the script is started with")
    options = parser.parse_args(argv)
    print(write(translate(options.script, options.arguments)), end="")
    return ExitCode.OK


def translate(script: Path, arguments: Sequence[str] = ()) -> Translation:
    """Translate a script; raise an InputError if it cannot be read, or starts no run."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{script} cannot be read ({error}): write a launch script") from error
    if script.suffix in (".yaml", ".yml"):
        return _translate_settings("trl", dict(_read_flat_yaml(text)))
    if script.suffix == ".py":
        return _translate_settings("trl", dict(_read_keywords(text, script)))
    variables = {"0": str(script), "BASH_SOURCE": str(script)}
    commands = read_shell_script(text, variables, arguments, functools.partial(_read_beside, script)).commands
    found = next(filter(None, map(_find_run, commands)), None)
    if found is None:
        raise InputError(f"{script} starts no run that is known: write a script of slime, Megatron-LM, verl or TRL")
    head, words = found
    if any(word.startswith("verl.") for word in head):
        return _translate_settings("verl", _read_overrides(words))
    if "trl" in head or "accelerate" in head:
        settings = _read_switches(words)
        processes = _read_launcher(head).get("num_processes")
        if processes is not None:
            settings["num_processes"] = processes
        return _translate_settings("trl", settings)
    return _translate_flags(head, words)


def _read_beside(script: Path, path: str) -> str | None:
    """Read a file that a script sources: by its path, or beside the script."""
    for file in (Path(path), script.parent / path):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _find_run(command: list[str]) -> tuple[list[str], list[str]] | None:
    """Return the launcher's words and the run's, if a command starts a run."""
    if command[0].rsplit("/", 1)[-1] not in _LAUNCHERS:
        return None
    for at, word in enumerate(command[1:], 1):
        if (
            word.endswith(".py")
            or (command[at - 1] == "-m" and "." in word)
            or (command[0] == "trl" and word == "grpo")
        ):
            return command[: at + 1], command[at + 1 :]
    return None


def _read_overrides(words: list[str]) -> dict[str, str]:
    """Read Hydra's overrides: key=value, with + before a new key."""
    pairs = (word.lstrip("+~").partition("=") for word in words if "=" in word and not word.startswith("--"))
    return {key: value.strip("'\"") for key, _, value in pairs}


def _read_switches(words: Sequence[str]) -> dict[str, str]:
    """Read --key value and --key=value, with dashes as underscores; a key without a value is on."""
    settings: dict[str, str] = {}
    for name, values in _group_words(words):
        settings[name.removeprefix("--").replace("-", "_")] = " ".join(values) or "true"
    return settings


def _read_flat_yaml(text: str) -> Iterator[tuple[str, str]]:
    """Read the settings of a file of `key: value` lines; nested ones are not TRL's."""
    for line in text.splitlines():
        match = re.fullmatch(r"([A-Za-z_]\w*):\s*(.*?)\s*(?:#.*)?", line)
        if match is not None and match.group(2):
            yield match.group(1), match.group(2).strip("'\"")


def _read_keywords(text: str, script: Path) -> Iterator[tuple[str, str]]:
    """Read the keywords that a program passes to GRPOConfig, and the model that it passes to GRPOTrainer."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{script} is not Python ({error}): write TRL's program") from error
    for node in ast.walk(tree):
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if name not in ("GRPOConfig", "GRPOTrainer"):
            continue
        assert isinstance(node, ast.Call)
        for keyword in node.keywords:
            key = {"model": "model_name_or_path"}.get(keyword.arg or "", keyword.arg or "")
            if isinstance(keyword.value, ast.Constant):
                yield key, str(keyword.value.value)
            elif key not in ("args", "model_name_or_path", "processing_class"):
                yield key, ast.unparse(keyword.value)


def _translate_settings(project: str, settings: Mapping[str, str]) -> Translation:
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))[project]
    translation = Translation(table["title"])
    unsaid = set(table["unsaid"].split()) | set(table["ranks"])
    given = [settings[name] for name in table["ranks"] if settings.get(name, "").isdigit()]
    translation.ranks = functools.reduce(lambda product, text: product * int(text), given, 1) if given else None
    for key, value in settings.items():
        entry = table["settings"].get(key)
        if key in unsaid:
            translation.unsaid.append(key)
        elif entry is None:
            translation.lost.append(f"{key} = {value}: nothing here is called so")
        else:
            _carry(translation, key, value, {"flag": entry} if not isinstance(entry, dict) else entry, settings)
    if not any(name in translation.words for name in ("--reward",)):
        translation.lost.append("rewards: write --reward FILE.py:FUNCTION, or one of the ready-made ones")
    return translation


def _carry(
    translation: Translation, key: str, value: str, entry: Mapping[str, Any], settings: Mapping[str, str]
) -> None:
    """Add the flags that one setting is translated to."""
    needed = entry.get("needs")
    if needed is not None and settings.get(needed, "false").lower() != "true":
        translation.unsaid.append(key)
        return
    values = entry.get("values")
    if values is not None and (value in values or not entry.get("others")):
        if value not in values:
            translation.lost.append(f"{key} = {value}: write one of {', '.join(values)}, which are known here")
            return
        value = values[value]
        if not value:
            translation.unsaid.append(key)
            return
    for other in entry.get("times", ()):
        if other in settings:
            if not (value.isdigit() and settings[other].isdigit()):
                translation.lost.append(f"{key} = {value}: it is a count of prompts; write --global-batch-size")
                return
            value = str(int(value) * int(settings[other]))
    names = [entry["flag"]] if isinstance(entry["flag"], str) else entry["flag"]
    known = _index_flags()
    for place, name in enumerate(names):
        if known[name].is_switch:
            if value.lower() in ("true", "on", "1"):
                translation.words[name] = []
        elif place == 0:
            translation.words[name] = [value]
        else:
            # A setting with this name of its own has precedence.
            translation.words.setdefault(name, [value])


def _translate_flags(head: list[str], words: list[str]) -> Translation:
    """Translate flags: Megatron's are ours; those of slime and others have an entry in the table of flags."""
    known = _index_flags()
    projects = [flag.project for name, _ in _group_words(words) if (flag := known.get(name)) and flag.project]
    translation = Translation(max(projects, key=projects.count) if projects else "Megatron-LM")
    translation.ranks = _count_ranks(head, words)
    meant: dict[str, list[str]] = {}
    written = {name for name, _ in _group_words(words)}
    prefixes = tuple(prefix for project in flags.list_projects().values() for prefix in project.get("prefixes", ()))
    for name, values in _group_words(words):
        flag, source = known.get(name), " ".join((name, *values))
        if flag is None:
            (translation.unsaid if name.startswith(prefixes) else translation.lost).append(
                name if name.startswith(prefixes) else f"{source}: nothing here is called so"
            )
        elif flag.kind is Kind.IGNORED:
            translation.unsaid.append(name)
        elif flag.kind is Kind.REFUSED and (flag.is_switch or not _is_accepted(flag, values)):
            translation.lost.append(f"{source}: {flag.remedy}")
        elif flag.kind is Kind.REFUSED:
            translation.unsaid.append(name)
        elif flag.means:
            meant[flag.means] = values
        elif flag.renamed and not set(values) <= set(flag.choices):
            translation.lost.append(f"{source}: {flag.remedy}")
        else:
            translation.words[name] = values
    translation.words = {**meant, **translation.words}
    for project in flags.list_projects().values():
        if project["title"] == translation.source:
            for implied, unless in project.get("implies", {}).items():
                name, *values = implied.split()
                if unless not in written:
                    translation.words.setdefault(name, values)
    if "--reward" not in translation.words:
        translation.lost.append("rewards: write --reward FILE.py:FUNCTION, or one of the ready-made ones")
    return translation


def _is_accepted(flag: Flag, values: Sequence[str]) -> bool:
    return flag.accepts(flag.read(values) if flag.nargs is not None or len(values) == 1 else None)


def _count_ranks(head: Sequence[str], words: Sequence[str]) -> int | None:
    """Return the number of ranks that torchrun, or slime, is given."""
    told = _read_launcher([*head, *words])
    pairs = (("nproc_per_node", "nnodes"), ("actor_num_gpus_per_node", "actor_num_nodes"))
    for per_node, nodes in pairs:
        if told.get(per_node, "").isdigit():
            count = told.get(nodes, "1")
            return int(told[per_node]) * (int(count) if count.isdigit() else 1)
    return None


def _read_launcher(words: Sequence[str]) -> dict[str, str]:
    """Read a launcher's flags, each with one value; further words are the program's."""
    return {name.strip("-").replace("-", "_"): (values or [""])[0] for name, values in _group_words(words)}


def _group_words(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that follow it."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                yield name, values
            name, found, value = word.partition("=")
            values = [value] if found else []
        else:
            values.append(word)


@functools.cache
def _index_flags() -> Mapping[str, Flag]:
    # The flags depend on the installed megatron-core.
    select("cpu").install()
    return index_by_name(flags.list_flags())


def write(translation: Translation) -> str:
    """Write the command line, with shell comments that name what it leaves out."""
    ranks = translation.ranks or 1
    lines = [f"# From {translation.source}."]
    lines += [f"# Not carried over: {text}" for text in translation.lost]
    if translation.unsaid:
        lines.append(f"# Without a flag here: {' '.join(dict.fromkeys(translation.unsaid))}")
    command = f"torchrun --nproc-per-node {ranks} --master-addr 127.0.0.1 --master-port 29500 pretrain_grpo.py"
    parts, line = [command], ""
    for name, values in translation.words.items():
        text = " ".join((name, *map(_quote, values)))
        if line and len(line) + len(text) >= _WIDTH:
            parts.append(line)
            line = ""
        line = f"{line} {text}".strip()
    parts += [line] if line else []
    return "\n".join(lines) + "\n" + " \\\n    ".join(parts) + "\n"


def _quote(word: str) -> str:
    """Quote a word for the shell, which may still expand variables and commands."""
    return f'"{word}"' if "$" in word or "`" in word else shlex.quote(word)
