"""megatron-rl translate: the command line of this package for a run of slime, Megatron-LM, verl, NeMo-RL or TRL."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.command_line.parse import list_problems
from megatron_rl.errors import ExitCode, InputError
from megatron_rl.migrate.launch_command import (
    STAGE,
    find_command,
    group_words,
    read_flat_yaml,
    read_launcher,
    read_overrides,
    read_program,
    read_switches,
)
from megatron_rl.migrate.nemo_config import PROGRAMS, find_nemo_config, is_nemo_config, read_nemo_config
from megatron_rl.migrate.translate_flags import translate_flags
from megatron_rl.migrate.translate_nemo import translate_nemo
from megatron_rl.migrate.translate_trl import translate_trl
from megatron_rl.migrate.translate_verl import translate_verl
from megatron_rl.migrate.translation import Translation

_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Print the translation of a script; return USAGE if a run would refuse it."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl translate",
        description="Prints the command line of this package for a run of slime, Megatron-LM, verl, NeMo-RL or TRL.",
    )
    parser.add_argument("script", type=Path, help="a launch script (.sh), or settings of TRL or NeMo-RL (.yaml or .py)")
    parser.add_argument("arguments", nargs="*", help="the script's own arguments, or a config's overrides")
    parser.add_argument("--add", default="", metavar="FLAGS", help="flags of this package to write too, as one text")
    options = parser.parse_args(argv)
    translation = translate(options.script, options.arguments)
    translation.words |= dict(group_words(shlex.split(options.add)))
    problems = find_problems(translation)
    print(write(translation, problems), end="")
    return ExitCode.USAGE if problems else ExitCode.OK


def translate(script: Path, arguments: Sequence[str] = ()) -> Translation:
    """Translate a script; raise an InputError if it cannot be read, or starts no run."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{script} cannot be read ({error}): write a launch script") from error
    if script.suffix in (".yaml", ".yml") and is_nemo_config(text):
        return translate_nemo(read_nemo_config(script, arguments), "", script)
    if script.suffix in (".yaml", ".yml"):
        return translate_trl(read_flat_yaml(text), script)
    if script.suffix == ".py":
        return translate_trl(read_program(text, script), script)
    head, words, missing = find_command(script, text, arguments)
    translation = _translate_command(head, words, script)
    translation.notes += (f"Not found, and its settings are missing here: source {path}" for path in missing)
    return translation


def _translate_command(head: Sequence[str], words: Sequence[str], script: Path) -> Translation:
    """Translate the command of a shell script: the launcher's words, and the run's."""
    if any(word.startswith("verl.") for word in head):
        settings = read_overrides(words)
        if "megatron" in read_launcher(words).get("config_name", ""):
            settings["model_engine"] = "megatron"
        return translate_verl(settings)
    if (program := Path(head[-1])).stem in (f"run_{name}" for name in PROGRAMS):
        config = find_nemo_config(program, read_launcher(words).get("config", ""), script)
        return translate_nemo(read_nemo_config(config, words), program.stem, script)
    if "trl" in head or "accelerate" in head:
        settings = read_switches(words)
        processes = read_launcher(head).get("num_processes")
        if processes is not None:
            settings["num_processes"] = processes
        if Path(head[-1]).stem == "dpo":
            settings[STAGE] = "dpo"
        return translate_trl(settings, script)
    return translate_flags(head, words, script)


def find_problems(translation: Translation) -> list[str]:
    """Find what a user must add or change before the command starts; our own parser checks it on this machine."""
    problems = [
        text for text, settled_by in translation.missing.items() if translation.words.keys().isdisjoint(settled_by)
    ]
    words = [os.path.expandvars(word) for name, values in translation.words.items() for word in (name, *values)]
    return [*problems, *list_problems(words, translation.nodes * translation.ranks)]


def write(translation: Translation, problems: Sequence[str] = ()) -> str:
    """Write the command line after shell comments with the settings that it omits and those that it needs."""
    lines = [f"# From {translation.source}.", *(f"# {text}" for text in translation.notes)]
    if translation.meaningless:
        lines.append(f"# Without effect here: {' '.join(dict.fromkeys(translation.meaningless))}")
    for title, texts in (
        ("Changes training and is not carried over", translation.changed),
        ("What you must add or change", problems),
    ):
        if texts:
            lines += [f"# {title}:", *(f"#   {text}" for text in texts)]
    rendezvous = "--standalone"
    if translation.nodes > 1:
        place = '--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500'
        rendezvous = f"--nnodes {translation.nodes} {place}"
    parts, line = [f"torchrun {rendezvous} --nproc-per-node {translation.ranks} pretrain_grpo.py"], ""
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
