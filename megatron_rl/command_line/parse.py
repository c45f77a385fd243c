"""The parser of a command line into checked settings. The argparse namespace does not leave this file."""

import argparse
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from megatron_rl import platforms
from megatron_rl.command_line import attention_times, checks, describe, flags, model, resolve
from megatron_rl.command_line.algorithm_checks import note_filter
from megatron_rl.command_line.derive import Derivation, drop_longest_sequence
from megatron_rl.command_line.flags import MEANT, OWN, SECONDARY, Given
from megatron_rl.command_line.rank_store import find_smallest_device
from megatron_rl.command_line.run import RunSettings, Sizes, resolve_run, resolve_sizes
from megatron_rl.command_line.stage import list_others
from megatron_rl.config.settings import DraftSettings, RunConfig, Settings, Subjects
from megatron_rl.errors import ExitCode, InputError, MegatronRLError, UsageError
from megatron_rl.flag import Flag, FlagParser, Kind, derive_flags, find_nearest, index_by_name, suggest_nearest
from megatron_rl.ops import shared_prompt
from megatron_rl.ops.backends import Choice, Conditions
from megatron_rl.ops.operations import OPERATIONS
from megatron_rl.platforms import Platform
from megatron_rl.types import Architecture
from megatron_rl.versions import find_docs

__all__ = ["RunSettings", "Settings", "list_problems", "parse", "parse_run", "parse_sizes"]

_NAME = re.compile(r"--[a-z][\w-]*")
_MISSING = re.compile(rf"{_NAME.pattern} is missing:")


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Parse the settings of a command line, by default this process's.

    All mistakes are raised as one UsageError, before any process group exists. This installs the platform, because the
    flags are those of the megatron-core that runs on it.
    """
    reading = _read(argv)
    draft = _resolve_settings(reading, _find_world_size(), needs_folder=False)
    _raise_problems(reading)
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
    values, problems = resolve_run(draft, is_first=os.environ.get("RANK", "0") == "0")
    reading.consider(problems)
    _raise_problems(reading)
    assert values is not None
    return RunSettings.accept(draft, words=(*words, *_list_derived(draft, reading)), **vars(values))


def parse_sizes(argv: Sequence[str], world_size: int, device: int | None = None) -> tuple[Settings, Sizes]:
    """Parse the settings of a model on this many ranks, and the sizes of a run's iteration.

    Flags that only a run needs may be missing: data, a reward, a learning rate, folders to write to. `device` has the
    bytes of each rank's device, if this host need not have it.
    """
    reading = _read([*argv, "--print-config"], device)
    draft = _resolve_settings(reading, world_size, needs_folder=True)
    sizes, problems = resolve_sizes(draft, max(1, world_size // draft.parallel_sizes.model))
    reading.consider(problems)
    _raise_problems(reading)
    assert sizes is not None
    return Settings.accept(draft), sizes


def list_problems(argv: Sequence[str], world_size: int, has_files: bool = True) -> list[str]:
    """List all mistakes in the command line of a run whose devices another machine has.

    Without `has_files` another machine has its files too: then they are not checked, and neither is its sidecar, except
    that flags are missing.
    """
    reading = _read([*argv, "--print-config"])
    draft = _resolve_settings(reading, world_size, needs_folder=True)
    _, problems = resolve_run(draft, is_first=True)
    if not has_files:
        _, elsewhere = resolve_run(draft, is_first=False)
        problems = [problem for problem in problems if problem in elsewhere or _MISSING.match(problem)]
        reading.problems = [problem for problem in reading.problems if problem != str(reading.input_error)]
    reading.consider(problems)
    return reading.problems


@dataclasses.dataclass
class _Reading:
    """The values of a command line, and its mistakes."""

    flags: Sequence[Flag]
    platform: Platform
    given: dict[str, Given] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    # Flags that are already known to be wrong: problems that follow from their values are not reported too.
    faulty: set[str] = dataclasses.field(default_factory=set)
    # The error of reading a file; it is raised itself if it is the only problem.
    input_error: InputError | None = None
    # The bytes of the smallest device of a rank; None if ranks have none of their own, or if it is not known here.
    device: int | None = None
    # The name of this host's devices; None if they are another host's.
    chip: str | None = None
    # The flags that were written, each with its values.
    written: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    # Flags of other projects that mean one of ours, by project.
    meant: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    # Flags without effect, by reason.
    ignored: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)

    def fault(self, problem: str, name: str) -> None:
        self.problems.append(problem)
        self.faulty.add(name)

    def keep(self, target: str, new: Given) -> None:
        """Keep a value, unless another flag's value has precedence; the last value of a flag counts."""
        old = self.given.get(target)
        if old is None or old.value == new.value:
            if old is None or new.rank > old.rank:
                self.given[target] = new
            return
        if old.rank == new.rank == OWN and old.name != new.name:
            self.fault(f"{old.source} and {new.source} contradict each other: drop one of them", new.name)
            return
        holds, falls = (new, old) if new.rank >= old.rank else (old, new)
        self.given[target] = holds
        if falls.rank > SECONDARY:
            where = "which comes later" if holds.rank == falls.rank else "which is written itself"
            self.notes.append(f"{falls.source} is overruled by {holds.source}, {where}")

    def consider(self, problems: Iterable[str]) -> None:
        """Add the problems that name no faulty flag; the others follow from a problem that is already reported."""
        for problem in problems:
            named = _NAME.findall(problem)
            if problem in self.problems or not self.faulty.isdisjoint(named):
                continue
            self.problems.append(problem)
            if named and problem.startswith(f"{named[0]} is missing"):
                self.faulty.add(named[0])


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


def _raise_problems(reading: _Reading) -> None:
    if reading.input_error is not None and reading.problems == [str(reading.input_error)]:
        raise reading.input_error
    if reading.problems:
        raise UsageError(*reading.problems)


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
    reading = _Reading(flags.list_flags(), platform, device=device, chip=chip)
    if absence is not None:
        reading.notes.append(
            f"the platform {platform.name} is not on this machine ({absence}): values that depend on its packages come "
            "from this machine"
        )
    namespace = argparse.Namespace(reading=reading)
    _, rest = _make_parser(reading.flags).parse_known_args(words, namespace)
    _report_unknown(rest, reading)
    reading.notes += (f"{', '.join(taken)}: {project}'s" for project, taken in reading.meant.items())
    reading.notes += (f"without effect here: {', '.join(names)} ({why})" for why, names in reading.ignored.items())
    return reading


def find_platform_name(words: list[str]) -> str:
    """Find the value of --platform, which is needed before the other flags can be known."""
    flag = next(flag for flag in derive_flags(RunConfig, "run") if flag.name == "--platform")
    names = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == flag.name]
    names += [word.partition("=")[2] for word in words if word.startswith(f"{flag.name}=")]
    # An unknown platform is reported together with all other mistakes.
    return names[-1] if names and names[-1] in flag.choices else str(flag.default)


class _Formatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Return the values that --help shows after a flag; argparse itself reads any number of words there."""
        return action.flag.value_text() if isinstance(action, _Store) else super()._format_args(action, default_metavar)


class _Store(argparse.Action):
    """An action that keeps the value of a flag, and its words, under the flag's targets."""

    def __init__(self, *, flag: Flag, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name, words, reading = option or self.flag.name, list(values), namespace.reading
        source = " ".join((name, *words))
        reading.written[name] = words
        try:
            self.flag.check_count(words, name)
            value = self.flag.read(words, name)
            if problems := list(self.flag.check_bound(value, name)):
                raise UsageError(*problems)
        except UsageError as error:
            reading.fault(str(error), self.flag.name)
            return
        if self.flag.kind is Kind.REFUSED:
            if self.flag.is_switch or not self.flag.accepts(value):
                reading.fault(f"{source} is refused: {self.flag.remedy}", self.flag.name)
            return
        if self.flag.kind is Kind.IGNORED:
            # A value that asks for the behaviour of this package needs no note.
            if self.flag.allowed is None or not self.flag.accepts(value):
                reading.ignored.setdefault(self.flag.remedy, {})[name] = None
        elif not self.flag.accepts(value):
            reading.fault(f"{source} is not supported: {self.flag.remedy}", self.flag.name)
            return
        rank = MEANT if self.flag.means else OWN
        if self.flag.means:
            taken = f"{source} is taken as {' '.join((self.flag.means, *words))}"
            reading.meant.setdefault(self.flag.project, {})[taken] = None
        for target in self.flag.targets:
            reading.keep(target, Given(value, source, self.flag.name, rank))
            rank = min(rank, SECONDARY) if self.flag.means else rank


def _make_parser(flags: Iterable[Flag]) -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="pretrain_grpo.py",
        description="Trains on rewards or demonstrations under Megatron's flags. "
        f"{find_docs() or 'docs'}/flags.md lists them by subject.",
        formatter_class=_Formatter,
    )
    for flag in flags:
        text = flag.help if flag.kind is Kind.USED else f"{flag.kind}: {flag.remedy}"
        # Any number of words is allowed here, because argparse would stop at the first wrong number.
        parser.add_argument(
            *flag.names, action=_Store, flag=flag, dest=flag.name, help=text.replace("%", "%%"), nargs="*"
        )
    return parser


def _report_unknown(rest: Sequence[str], reading: _Reading) -> None:
    # A refused flag is never suggested.
    known = index_by_name(flag for flag in reading.flags if flag.kind is not Kind.REFUSED and not flag.project)
    names = [word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"]
    for name in names:
        reason = _find_prefix(name)
        if reason is not None:
            reading.ignored.setdefault(reason, {})[name] = None
            continue
        reading.problems.append(f"unknown flag {name}{suggest_nearest(name, known)}")
        near = find_nearest(name, known)
        if near is not None:
            # The flag that was probably meant is not reported as missing.
            reading.faulty.add(known[near].name)
    if rest and not names:
        reading.problems.append(f"unexpected {rest[0]!r}: every value follows its flag")


def _find_prefix(name: str) -> str | None:
    """Return why a flag has no effect, if it has a prefix of another project's flags."""
    for project in flags.list_projects().values():
        if name.startswith(tuple(project.get("prefixes", ()))):
            return str(project["prefix_reason"])
    return None


def _resolve_settings(reading: _Reading, world_size: int | None, needs_folder: bool) -> DraftSettings:
    """Resolve the settings, and note what is wrong with them.

    If a folder is needed and missing, flags that describe a model are not read; the code that needs it reports that.
    """
    given, platform = reading.given, reading.platform
    configs_of = get_type_hints(Subjects)
    folder = given["model.hf_model"].value if "model.hf_model" in given else None
    architecture = None if folder is None and needs_folder else _read_architecture(folder, reading)
    _derive(reading, architecture, world_size, configs_of)
    subjects = {name: config(**_select_values(name, given)) for name, config in configs_of.items()}
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
    if architecture is not None:
        settings = _choose_backends(settings, architecture, reading)
    if not reading.problems:
        reading.problems += refusals
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
    settled = reading.given.keys() | list_others()[stage]
    relied = {
        name: own
        for name, (own, _) in others.items()
        if name not in reading.written and settled.isdisjoint(by_name[name].targets)
    }
    if relied and is_verbose:
        listed = ", ".join(f"{name} ({own})" for name, own in relied.items())
        yield f"defaults that differ from Megatron's scripts (docs/flags.md has both): {listed}"
    elif relied:
        yield f"flags left to a default that differs from Megatron's scripts: {len(relied)} (--verbose lists them)"


def _derive(
    reading: _Reading, architecture: Architecture | None, world_size: int | None, configs_of: Mapping[str, type]
) -> None:
    """Add the values that follow from the given ones."""
    defaults = {
        f"{subject}.{field.name}": field.default
        for subject, config in configs_of.items()
        for field in dataclasses.fields(config)
    }
    is_sampled = "run.stage" not in reading.given or reading.given["run.stage"].value == "grpo"
    if not is_sampled:
        # A demonstration is a group of one response.
        defaults["algorithm.group_size"] = 1
    derivation = Derivation(reading.given, defaults, reading.notes.append)
    derivation.imply_projects(reading.written, index_by_name(reading.flags))
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
    longest = drop_longest_sequence(reading.given) if folder is not None else None
    if folder is None and (guest := reading.given.get("model.weights_bridge")) is not None:
        reading.problems.append(f"{guest.source} needs --hf-model: name the folder of its model, or drop the flag")
    try:
        found = model.read_flags(reading.given) if folder is None else model.read_folder(folder, reading.given)
    except UsageError as error:
        reading.consider(error.problems)
        return None
    except InputError as error:
        reading.problems.append(str(error))
        reading.input_error = error
        return None
    architecture, problems = found
    reading.consider(problems)
    if longest is not None and architecture is not None and longest.value != architecture.max_position_embeddings:
        reading.notes.append(
            f"{longest.source} has no effect: the model's longest sequence is {architecture.max_position_embeddings}, "
            "and --seq-length is the run's"
        )
    return architecture


def _choose_backends(settings: DraftSettings, architecture: Architecture, reading: _Reading) -> DraftSettings:
    """Return the settings with the backends that will run, of each operation that has several."""
    device, dtype = platforms.select(settings.platform).device_type, settings.transformer.params_dtype
    if settings.rollout.is_batch_invariant and device == "cpu":
        return _choose_invariant(settings)
    conditions = Conditions.of(device, dtype, architecture)
    settings = _choose_attention(settings, architecture, reading, conditions)
    for target, backends in OPERATIONS.items():
        if target != "attention.backend" and backends.is_used(conditions):
            choose = functools.partial(backends.choose, conditions=conditions)
            settings = _choose_backend(settings, target, reading, choose)
    return settings


def _choose_invariant(settings: DraftSettings) -> DraftSettings:
    """Return the settings with the backends of --batch-invariant, which `check_batch_invariant` allows alone."""
    name: Any = "invariant"
    model = dataclasses.replace(settings.model, output_layer_backend=name, elementwise_backend=name, qkv_backend=name)
    return dataclasses.replace(settings, model=model, attention=dataclasses.replace(settings.attention, backend=name))


def _choose_attention(
    settings: DraftSettings, architecture: Architecture, reading: _Reading, conditions: Conditions
) -> DraftSettings:
    """Return the settings with the backend of attention, from measured times if there are any, and its blocks."""
    try:
        near = attention_times.find_measured(settings, architecture, reading.chip)
        settings = _choose_backend(
            settings,
            "attention.backend",
            reading,
            lambda name: shared_prompt.choose_backend(name, conditions, near),
            is_said=near is not None,
        )
        return attention_times.choose_blocks(settings, near)
    except UsageError as error:
        reading.consider(error.problems)
        return settings


def _choose_backend(
    settings: DraftSettings,
    target: str,
    reading: _Reading,
    choose: Callable[[str], Choice],
    is_said: bool = False,
) -> DraftSettings:
    """Return the settings with a field's backend chosen; if the named one cannot run, add that to the problems."""
    subject, field = target.split(".")
    config: Any = getattr(settings, subject)
    try:
        choice = choose(getattr(config, field))
    except UsageError as error:
        reading.consider(error.problems)
        return settings
    changed = {subject: dataclasses.replace(config, **{field: choice.name})}
    sources = dict(settings.sources)
    if choice.notes:
        sources[target] = "; ".join(choice.notes)
    notes = (*settings.notes, *(choice.notes if is_said or settings.observe.verbose else ()))
    return dataclasses.replace(settings, **changed, sources=sources, notes=notes)


def _find_world_size() -> int | None:
    text = os.environ.get("WORLD_SIZE")
    return int(text) if text else None


def _select_values(subject: str, given: Mapping[str, Given]) -> dict[str, Any]:
    prefix = f"{subject}."
    return {target.removeprefix(prefix): item.value for target, item in given.items() if target.startswith(prefix)}


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
