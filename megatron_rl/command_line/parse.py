"""The parser of a command line into checked settings. The argparse namespace does not leave this file."""

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_type_hints

from megatron_rl import platforms
from megatron_rl.command_line import checks, describe, flags, model, resolve
from megatron_rl.command_line.algorithm_checks import note_filter
from megatron_rl.command_line.backends import choose_backends
from megatron_rl.command_line.derive import Derivation
from megatron_rl.command_line.other_projects import rewrite
from megatron_rl.command_line.rank_store import find_smallest_device
from megatron_rl.command_line.run import RunSettings, Sizes, resolve_run, resolve_sizes
from megatron_rl.config.settings import DraftSettings, RunConfig, Settings, Subjects
from megatron_rl.errors import ExitCode, InputError, MegatronRLError, UsageError
from megatron_rl.flag import Flag, derive_flags, index_by_name
from megatron_rl.flag_parser import FlagParser, ParsedFlags, make_parser, parse_words
from megatron_rl.platforms import Platform
from megatron_rl.types import Architecture
from megatron_rl.versions import find_docs

__all__ = ["RunSettings", "Settings", "list_problems", "parse", "parse_run", "parse_sizes"]

# Only runs with a teacher, a critic or --grpo-role import it.
_OTHER_MODELS = "megatron_rl.command_line.other_models"
# The mistakes about a run's sidecar that need none of its files: a missing flag, and a reward of another name.
_WITHOUT_FILES = re.compile(r"--[a-z][\w-]* is missing:|--reward \S+ must be FILE")


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Parse the settings of a command line, by default this process's.

    All mistakes are raised as one UsageError, before any process group exists. This installs the platform, because the
    flags are those of the megatron-core that runs on it.
    """
    reading = _read(argv)
    draft = _resolve_settings(reading, _find_world_size(), needs_folder=False)
    reading.raise_problems()
    return Settings.accept(draft)


def parse_run(argv: Sequence[str] | None = None, world_size: int | None = None) -> RunSettings:
    """Parse the settings of a run that trains, on this many ranks.

    By default these are the launcher's ranks, or one rank without a launcher.
    """
    words = tuple(sys.argv[1:] if argv is None else argv)
    reading = _read(words)
    world_size = _find_world_size() if world_size is None else world_size
    if world_size is None and "run.print_config" not in reading.given:
        world_size = 1
    draft = _resolve_settings(reading, world_size, needs_folder=True)
    values, problems, of_host = resolve_run(draft)
    reading.consider((*problems, *(of_host if os.environ.get("RANK", "0") == "0" else ())))
    reading.raise_problems()
    assert values is not None
    return RunSettings.accept(draft, words=(*words, *_list_derived(draft, reading)), **values)


def parse_sizes(argv: Sequence[str], world_size: int, device: int | None = None) -> tuple[Settings, Sizes]:
    """Parse the settings of a model on this many ranks, and the sizes of a run's iteration.

    Flags that only a run needs may be missing: data, a reward, a learning rate, folders to write to. `device` has the
    bytes of each rank's device, if this host need not have it.
    """
    reading = _read([*argv, "--print-config"], device)
    draft = _resolve_settings(reading, world_size, needs_folder=True)
    sizes, problems = resolve_sizes(draft, max(1, world_size // draft.parallel_sizes.model))
    reading.consider(problems)
    reading.raise_problems()
    assert sizes is not None
    return Settings.accept(draft), sizes


def list_problems(argv: Sequence[str], world_size: int, has_files: bool = True) -> list[str]:
    """List all mistakes in the command line of a run whose devices another machine has.

    Without `has_files` another machine has its files too: then they are not checked, and neither is its sidecar, except
    for missing flags and names of rewards.
    """
    reading = _read([*argv, "--print-config"])
    draft = _resolve_settings(reading, world_size, needs_folder=True)
    _, problems, of_host = resolve_run(draft)
    if not has_files:
        of_host = filter(_WITHOUT_FILES.match, of_host)
        reading.problems = [problem for problem in reading.problems if problem != str(reading.input_error)]
    reading.consider((*problems, *of_host))
    return reading.problems


@dataclasses.dataclass
class _Reading(ParsedFlags):
    """The values of a trainer's command line, and what is known of its devices."""

    platform: Platform = dataclasses.field(kw_only=True)
    device: int | None = None
    """The bytes of the smallest device of a rank; None if ranks have none of their own, or if it is not known here."""
    chip: str | None = None
    """The name of this host's devices; None if they are another host's."""


def _list_derived(settings: DraftSettings, reading: _Reading) -> Iterator[str]:
    """Yield the flags that follow from the device, for a process that does not see it."""
    if reading.device is None:
        return
    yield from ("--micro-batch-size", str(settings.training.micro_batch_size))
    modules = reading.given.get("transformer.recompute_modules")
    if modules is not None and not modules.name:
        config = settings.transformer
        yield from ("--recompute-granularity", config.recompute_granularity)
        yield from ("--recompute-modules", *config.recompute_modules)


def _read(argv: Sequence[str] | None, device: int | None = None) -> _Reading:
    """Read the command line, as far as it can be understood; `device` has the bytes of another host's devices."""
    words = list(sys.argv[1:] if argv is None else argv)
    platform = platforms.select(find_platform_name(words))
    absence = chip = None
    if "--print-config" in words:
        absence = platforms.install_for_reading(platform)
    else:
        platform.install()
    if device is None and absence is None:
        device = find_smallest_device(platform.smallest_device(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        chip = platform.device_name()
    known = flags.list_flags()
    rewritten = rewrite(words, index_by_name(known))
    reading = _Reading(
        known, notes=rewritten.notes, origins=rewritten.origins, ignored=rewritten.ignored, platform=platform,
        device=device, chip=chip,
    )  # fmt: skip
    for refusal in rewritten.refusals:
        reading.fault(refusal.error, refusal.name)
    if absence is not None:
        reading.notes.append(
            f"the platform {platform.name} is not on this machine ({absence}): values that depend on its packages come "
            "from this machine"
        )
    parse_words(_make_parser(known), rewritten.words, reading)
    reading.notes += (f"without effect here: {', '.join(names)} ({why})" for why, names in reading.ignored.items())
    return reading


def _make_parser(known: Sequence[Flag]) -> FlagParser:
    return make_parser(
        "pretrain_grpo.py",
        "Trains on rewards, demonstrations or preferences under Megatron's flags. "
        f"{find_docs() or 'docs'}/flags.md lists them by subject.",
        known,
    )


def find_platform_name(words: list[str]) -> str:
    """Find the value of --platform, which is needed before the other flags can be known."""
    flag = next(flag for flag in derive_flags(RunConfig, "run") if flag.name == "--platform")
    names = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == flag.name]
    names += [word.partition("=")[2] for word in words if word.startswith(f"{flag.name}=")]
    # An unknown platform is reported together with all other mistakes.
    return names[-1] if names and names[-1] in flag.choices else str(flag.default)


def _resolve_settings(reading: _Reading, world_size: int | None, needs_folder: bool) -> DraftSettings:
    """Resolve the settings, and note what is wrong with them.

    If a folder is needed and missing, flags that describe a model are not read; the code that needs it reports that.
    """
    given, platform = reading.given, reading.platform
    configs_of = get_type_hints(Subjects)
    folder = given["model.hf_model"].value if "model.hf_model" in given else None
    architecture = None if folder is None and needs_folder else _read_architecture(folder, reading)
    _derive(reading, architecture, world_size, configs_of)
    subjects = {name: config(**reading.select_values(name)) for name, config in configs_of.items()}
    fields = resolve.resolve_fields(reading.flags, given, architecture, platform)
    configs, refusals = resolve.build_configs(fields)
    sources = {target: item.source for target, item in given.items()} | fields.sources
    if folder is not None:
        sources["architecture"] = str(folder / "config.json")
    settings = DraftSettings(
        **subjects,
        platform=platform.name,
        world_size=world_size,
        architecture=architecture,
        **configs,
        sources=sources,
        notes=(*reading.notes, *fields.notes),
    )
    reading.consider((*fields.problems, *checks.check_settings(settings)))
    written = settings
    if architecture is not None:
        settings = choose_backends(settings, architecture, reading.chip, reading.consider)
    if not reading.problems:
        reading.problems += refusals
    if settings.run.stage == "grpo" and not reading.problems:
        common = (written, reading.flags, given, platform, reading.chip)
        if settings.algorithm.teacher is not None or settings.algorithm.roles:
            frozen, problems = importlib.import_module(_OTHER_MODELS).resolve_frozen(*common)
            reading.consider(problems)
            settings = dataclasses.replace(settings, frozen=frozen)
        if settings.algorithm.critic is not None and folder is not None:
            critic, problems = importlib.import_module(_OTHER_MODELS).resolve_critic(*common)
            reading.consider(problems)
            settings = dataclasses.replace(settings, critic=critic)
    if architecture is not None and not reading.problems:
        notes = (
            *_note_other_defaults(reading, settings.run.stage, settings.observe.verbose),
            *checks.note_idle_flags(Settings.accept(settings)),
            *note_filter(settings),
        )
        settings = dataclasses.replace(settings, notes=(*settings.notes, *notes))
    return settings


def _note_other_defaults(reading: _Reading, stage: str, is_verbose: bool) -> Iterator[str]:
    """Yield a note of the flags left to defaults that differ from those of Megatron's scripts: a count, or all."""
    others, by_name = flags.find_other_defaults(), index_by_name(reading.flags)
    # Flags of the other stage are not counted.
    settled = reading.given.keys() | checks.list_others()[stage]
    relied = {
        name: own
        for name, (own, _) in others.items()
        if by_name[name].name not in reading.written and settled.isdisjoint(by_name[name].targets)
    }
    if relied and is_verbose:
        listed = ", ".join(f"{name} ({own})" for name, own in relied.items())
        yield f"defaults that differ from Megatron's scripts (docs/flags.md has both): {listed}"
    elif relied:
        yield f"flags left to a default that differs from Megatron's scripts: {len(relied)} (--verbose lists them)"


def _derive(
    reading: _Reading, architecture: Architecture | None, world_size: int | None, configs_of: Mapping[str, type]
) -> None:
    defaults = {
        f"{subject}.{field.name}": field.default
        for subject, config in configs_of.items()
        for field in dataclasses.fields(config)
    }
    is_sampled = "run.stage" not in reading.given or reading.given["run.stage"].value == "grpo"
    if not is_sampled:
        # A demonstration or pair counts as a group of one response.
        defaults["algorithm.group_size"] = 1
    derivation = Derivation(reading.given, defaults, reading.notes.append)
    derivation.settle_algorithm()
    derivation.settle_vocabulary(architecture)
    if is_sampled:
        derivation.settle_group_size(world_size)
    derivation.count_samples()
    if is_sampled:
        derivation.settle_lengths(architecture)
    is_shared = "attention.is_shared" not in reading.given
    derivation.settle_micro_batch(world_size, is_shared)
    if architecture is not None and reading.device is not None and not reading.problems:
        cheap = resolve.list_cheap_modules(reading.platform.cheap_modules, architecture, reading.given)
        derivation.settle_pack(world_size, is_shared, architecture, reading.device, cheap)
    derivation.settle_precisions(architecture, is_sampled, is_cpu=reading.platform.name == "cpu")
    if is_sampled and reading.platform.name == "cpu" and not reading.problems:
        # If the model's flags have mistakes, its size is unknown.
        derivation.settle_engines(int(os.environ.get("LOCAL_WORLD_SIZE", world_size or 1)), architecture)
    reading.consider(derivation.problems)


def _read_architecture(folder: Path | None, reading: _Reading) -> Architecture | None:
    # The folder's config.json gives the longest sequence, and rotary positions have no such limit.
    longest = None if folder is None else reading.given.pop("architecture.max_position_embeddings", None)
    if folder is None and (guest := reading.given.get("model.weights_bridge")) is not None:
        reading.problems.append(f"{guest.source} needs --hf-model: name the folder of its model, or drop the flag")
    try:
        found = model.read_flags(reading.given) if folder is None else model.read_folder(folder, reading.given)
    except UsageError as error:
        reading.consider(error.problems)
        return None
    except InputError as error:
        reading.consider_input(error)
        return None
    architecture, problems = found
    reading.consider(problems)
    if longest is not None and architecture is not None and longest.value != architecture.max_position_embeddings:
        reading.notes.append(
            f"{longest.source} has no effect: the model's longest sequence is {architecture.max_position_embeddings}, "
            "and --seq-length is the run's"
        )
    return architecture


def _find_world_size() -> int | None:
    text = os.environ.get("WORLD_SIZE")
    return int(text) if text else None


def main(argv: Sequence[str] | None = None) -> int:
    """Check a command line and print the resolved settings; with --docs alone, print docs/flags.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--docs"]:
        # The page depends on the version of megatron-core, not on the platform.
        platforms.select("cpu").install()
        sys.stdout.write(describe.write_flags_page())
        return ExitCode.OK
    try:
        sys.stdout.write(describe.print_config(parse_run([*words, "--print-config"])))
    except MegatronRLError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK
