"""From the command line to checked settings. The argparse namespace does not leave this file."""

import argparse
import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_type_hints

from megatron_rl import describe, platforms
from megatron_rl.config import RunConfig, Settings, Subjects
from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.flags import Flag, Kind, flags_of, index, nearest
from megatron_rl.mcore.flags import checks, generated, model, resolve, table
from megatron_rl.mcore.flags.given import Given
from megatron_rl.platforms import Platform

__all__ = ["Settings", "parse"]


def parse(argv: Sequence[str] | None = None) -> Settings:
    """The settings that the words of a command line (by default this process's) come to.

    Everything that contradicts something else is a UsageError here, before any process group exists. Installs the
    platform, because the table of flags is made from the megatron-core that runs on it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    platform = platforms.select(_platform_name(words))
    platform.install()
    flags = table.all_flags()
    given, notes = _read(words, flags)
    settings = _settings(flags, given, platform, notes)
    checks.check(settings, _world_size())
    return _built_once(settings, platform)


def _platform_name(words: Sequence[str]) -> str:
    """The value of --platform: the one flag that is needed before the others can be known."""
    flag = next(flag for flag in flags_of(RunConfig, "run") if flag.name == "--platform")
    names = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == flag.name]
    names += [word.partition("=")[2] for word in words if word.startswith(f"{flag.name}=")]
    return str(flag.value([names[-1]])) if names else str(flag.default)


def _world_size() -> int | None:
    text = os.environ.get("WORLD_SIZE")
    return int(text) if text else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


class _Store(argparse.Action):
    """Remembers a flag's words under its targets, and that it was said."""

    def __init__(self, *, flag: Flag, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name = option or self.flag.name
        words = [values] if isinstance(values, str) else list(values or ())
        value = self.flag.value(words, name)
        source = " ".join((name, *words))
        if self.flag.kind is Kind.REFUSED and self.flag.accepts(value) and not self.flag.is_switch:
            return
        if self.flag.kind is Kind.REFUSED:
            namespace.refused[name] = f"{source} is refused: {self.flag.remedy}"
            return
        if not self.flag.accepts(value):
            raise UsageError(f"{source} is not supported: {self.flag.remedy}")
        if self.flag.kind is Kind.IGNORED:
            namespace.ignored.setdefault(self.flag.remedy, {})[name] = None
        for target in self.flag.targets or (f"ignored.{self.flag.name}",):
            _store_once(namespace.given, target, Given(value, source))


def _store_once(given: dict[str, Given], target: str, item: Given) -> None:
    earlier = given.setdefault(target, item)
    if earlier.value != item.value:
        raise UsageError(f"{earlier.source} and {item.source} contradict each other: drop one of them")


def _read(words: Sequence[str], flags: Sequence[Flag]) -> tuple[dict[str, Given], tuple[str, ...]]:
    """What was said, and what of it is without effect."""
    namespace = argparse.Namespace(given={}, refused={}, ignored={})
    _, rest = _parser(flags).parse_known_args(words, namespace)
    problems = [*_unknown(rest, flags), *namespace.refused.values()]
    if problems:
        raise UsageError("; ".join(problems))
    notes = tuple(f"without effect here: {', '.join(names)} ({remedy})" for remedy, names in namespace.ignored.items())
    return namespace.given, notes


def _parser(flags: Iterable[Flag]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_grpo.py",
        description="Trains with reinforcement learning under Megatron's flags. docs/flags.md lists them by subject.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for flag in flags:
        keywords: dict[str, Any] = {"nargs": 0} if flag.is_switch else {"nargs": flag.nargs}
        if not flag.is_switch:
            keywords["metavar"] = flag.value_text().replace(" ...", "")
        text = flag.help if flag.kind is Kind.USED else f"{flag.kind}: {flag.remedy}"
        parser.add_argument(
            *flag.names, action=_Store, flag=flag, dest=flag.name, help=text.replace("%", "%%"), **keywords
        )
    return parser


def _unknown(rest: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    names = [word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"]
    known = index(flags)
    problems = [f"unknown flag {name}{nearest(name, known)}" for name in names]
    if rest and not problems:
        problems.append(f"unexpected {rest[0]!r}: every value follows its flag")
    return problems


def _settings(
    flags: Sequence[Flag], given: Mapping[str, Given], platform: Platform, notes: tuple[str, ...]
) -> Settings:
    sources = {target: item.source for target, item in given.items()}
    subjects = {name: config(**_values_of(name, given)) for name, config in get_type_hints(Subjects).items()}
    folder = subjects["model"].hf_model
    if folder is None:
        architecture = model.from_flags(given)
    else:
        architecture = model.from_folder(folder, given)
        sources["architecture"] = str(folder / "config.json")
    fields = resolve.resolve(flags, given, architecture, generated.installed_version())
    backend = subjects["distributed"].distributed_backend
    if backend not in (None, platform.collective_backend):
        fields.notes.append(
            f"--distributed-backend {backend} has no effect: the platform {platform.name} has "
            f"{platform.collective_backend}"
        )
    return Settings(
        **subjects,
        platform=platform.name,
        architecture=architecture,
        transformer=fields.transformer,
        optimizer=fields.optimizer,
        ddp=fields.ddp,
        sources=sources | fields.sources,
        notes=(*notes, *fields.notes),
    )


def _values_of(subject: str, given: Mapping[str, Given]) -> dict[str, Any]:
    prefix = f"{subject}."
    return {target.removeprefix(prefix): item.value for target, item in given.items() if target.startswith(prefix)}


def _built_once(settings: Settings, platform: Platform) -> Settings:
    """Build megatron-core's configurations: what they refuse is a contradiction of flags too, and what the platform
    takes back of what flags asked for is noted.
    """
    # Found by name, because importing it imports megatron, which must come after the platform is installed.
    build = importlib.import_module("megatron_rl.mcore.config").transformer_config
    classes = generated.configs()
    with _translated("transformer"):
        transformer = build(settings.architecture, settings.transformer, platform)
    with _translated("optimizer"):
        classes["optimizer"](**settings.optimizer)
    with _translated("data-parallel"):
        classes["ddp"](**settings.ddp)
    taken_back = [
        settings.sources[f"transformer.{field}"]
        for field, value in settings.transformer.items()
        if getattr(transformer, field) != value and settings.sources[f"transformer.{field}"].startswith("--")
    ]
    notes = (f"without effect on the platform {platform.name}: {source}" for source in taken_back)
    return dataclasses.replace(settings, notes=(*settings.notes, *notes))


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, AssertionError) as error:
        version = generated.installed_version()
        reason = str(error) or "an assertion without a text"
        raise UsageError(f"megatron-core {version} refuses the {what} configuration: {reason}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Check a command line and print what it comes to; with --docs alone, print docs/flags.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--docs"]:
        # The page is of a version of megatron-core, not of a platform.
        platforms.select("cpu").install()
        sys.stdout.write(describe.flags_page())
        return ExitCode.OK
    try:
        sys.stdout.write(describe.print_config(parse(words)))
    except MegatronRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
