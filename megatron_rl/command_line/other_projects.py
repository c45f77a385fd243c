"""Flags of other projects, which are rewritten to ours before our parser reads a command line.

other_projects.toml says what becomes of each. Invariants:

- the rewritten words have no flag of other projects, except unknown ones;
- a flag of ours that is written overrules what others mean or imply;
- every flag that is dropped is refused, named with the reason, or asks for what holds anyway.
"""

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.command_line.flags import list_unused
from megatron_rl.errors import UsageError
from megatron_rl.flag import Flag, Kind
from megatron_rl.flag_parser import Origin

_FILE = Path(__file__).with_name("other_projects.toml")
DIVERGENCE = ("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--use-unbiased-kl")
"""slime's flags of a divergence in the loss, which count only together."""
_BETA, _ESTIMATOR = "--grpo-kl-beta", "--grpo-kl-estimator"


@dataclasses.dataclass(frozen=True)
class RefusedFlag:
    """A flag of another project that cannot be rewritten."""

    name: str
    error: str
    """The error of a run."""
    reason: str
    """The flag with what to write instead, for a list of such flags."""


@dataclasses.dataclass
class Rewritten:
    """A command line in which all flags are ours or Megatron's, as far as they are known."""

    words: list[str] = dataclasses.field(default_factory=list)
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)
    """The origins of the flags that are not written themselves."""
    notes: list[str] = dataclasses.field(default_factory=list)
    ignored: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    """Flags without effect, by reason."""
    idle: list[str] = dataclasses.field(default_factory=list)
    """Flags whose values ask for what holds anyway."""
    refusals: list[RefusedFlag] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Project:
    """The flags of another project."""

    title: str
    same: Mapping[str, str | list[str] | Mapping[str, str]] = dataclasses.field(default_factory=dict)
    together: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    unused: Mapping[str, Flag] = dataclasses.field(default_factory=dict)
    implies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implied_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    follows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    signs: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    prefix_reason: str = ""

    def has(self, name: str) -> bool:
        tables: tuple[Mapping[str, Any], ...] = (self.same, self.together, self.unused, self.conditions)
        return any(name in table for table in tables) or name.startswith(self.prefixes)

    @functools.cached_property
    def conditions(self) -> dict[str, tuple[str, str]]:
        """The flags that count only beside another one, each with that one and with what it means then."""
        return {name: (other, ours) for other, entry in self.beside.items() for name, ours in entry["flags"].items()}

    def find_remedy(self, name: str) -> str:
        """Return what to write instead of a flag that is refused, or of a choice; empty if the table does not say."""
        if name in self.unused:
            return self.unused[name].remedy
        entry = self.same.get(name)
        return entry["else"] if isinstance(entry, Mapping) else ""

    def describe(self, name: str) -> str:
        """Describe what a flag is rewritten to, in Markdown."""
        if name in self.together:
            return str(self.together[name]["help"])
        if name in self.conditions:
            other, ours = self.conditions[name]
            return f"`{ours}`, with `{other}`"
        entry = self.same[name]
        if isinstance(entry, Mapping):
            return ", ".join(f"`{text}` for {choice}" for choice, text in entry.items() if choice != "else")
        return " and ".join(f"`{ours}`" for ours in ([entry] if isinstance(entry, str) else entry))


@functools.cache
def read_projects() -> tuple[Project, ...]:
    """Read the table. Of two projects with the same flag, the first one's counts."""
    projects = []
    for section in tomllib.loads(_FILE.read_text(encoding="utf-8")).values():
        unused = {flag.name: flag for flag in list_unused(section)}
        lists = {"signs": tuple(section.get("signs", "").split()), "prefixes": tuple(section.get("prefixes", ()))}
        others = {key: value for key, value in section.items() if key not in ("without_effect", "refused")}
        projects.append(Project(**{**others, **lists}, unused=unused))
    return tuple(projects)


def find_project(name: str) -> Project | None:
    return next((project for project in read_projects() if project.has(name)), None)


def split_words(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values, as they are written; words before the first flag come first."""
    flag: list[str] = []
    for word in words:
        if word.startswith("--") and flag:
            yield flag
            flag = []
        flag.append(word)
    if flag:
        yield flag


def read_values(flag: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name and the values of a flag, of which the first may follow an equals sign."""
    name, found, value = flag[0].partition("=")
    return name, [value, *flag[1:]] if found else [*flag[1:]]


def rewrite(words: Sequence[str], known: Mapping[str, Flag]) -> Rewritten:
    """Rewrite the flags of other projects to ours; `known` are ours and Megatron's."""
    rewriter = _Rewriter(known)
    for flag in split_words(words):
        rewriter.add(flag)
    return rewriter.finish()


@dataclasses.dataclass(frozen=True)
class _Meant:
    """The values that a flag of ours gets from another project's."""

    values: Sequence[str]
    origin: Origin
    is_main: bool = True
    """Whether this is the first meaning of the other flag."""


class _Rewriter:
    """Collects the flags of a command line, and rewrites them once all are known."""

    def __init__(self, known: Mapping[str, Flag]):
        self._known = known
        self._stray: list[str] = []
        self._kept: list[str] = []
        # Our flags that are written, and the last of them that sets each target, as it is written.
        self._own: dict[str, list[str]] = {}
        self._targets: dict[str, str] = {}
        self._theirs: list[tuple[str, Project, list[str]]] = []
        self._meant: dict[str, _Meant] = {}
        self._result = Rewritten()

    def add(self, flag: Sequence[str]) -> None:
        name, values = read_values(flag)
        if not name.startswith("--"):
            self._stray += flag
        elif name not in self._known and (project := find_project(name)) is not None:
            self._theirs.append((name, project, values))
        else:
            self._kept += flag
            if name in self._known:
                known = self._known[name]
                self._own[known.name] = values
                self._targets |= dict.fromkeys(known.targets, _join(name, values))

    def finish(self) -> Rewritten:
        result = self._result
        taken: dict[str, dict[str, None]] = {}
        for name, project, values in self._theirs:
            try:
                meaning = self._rewrite(name, project, values)
            except UsageError as error:
                remedy = project.find_remedy(name)
                reason = f"{_join(name, values)}: {remedy}" if remedy else str(error)
                result.refusals.append(RefusedFlag(name, str(error), reason))
                continue
            if meaning is not None:
                taken.setdefault(project.title, {})[f"{_join(name, values)} is taken as {meaning}"] = None
        result.notes += (f"{', '.join(texts)}: {title}'s" for title, texts in taken.items())
        self._settle_divergence()
        implied = self._imply()
        # Words before all flags stay there: after a flag they would be its values.
        result.words = self._stray
        for name, meant in self._meant.items():
            result.words += (name, *meant.values)
        result.words += self._kept
        for name, meant in implied.items():
            result.words += (name, *meant.values)
        result.origins = {name: meant.origin for name, meant in (self._meant | implied).items()}
        return result

    def _rewrite(self, name: str, project: Project, values: list[str]) -> str | None:
        """Rewrite a flag, and return its first meaning; None if it has none of its own. Raise a UsageError."""
        if name in project.unused:
            self._drop(project.unused[name], values)
        elif name in project.together:
            _check_values(name, project.together[name].get("values"), values)
        elif name in project.conditions and not self._is_beside(condition := project.conditions[name][0]):
            self._result.notes.append(f"{_join(name, values)} has no effect without {condition}, as in {project.title}")
        elif name in project.same or name in project.conditions:
            entry = project.same[name] if name in project.same else project.conditions[name][1]
            meanings = _list_meanings(name, entry, values)
            for ours, theirs in meanings.items():
                is_main = ours == next(iter(meanings))
                self._mean(ours, _Meant(theirs, Origin(_join(name, values), name), is_main))
            return _join(*next(iter(meanings.items())))
        else:
            self._result.ignored.setdefault(project.prefix_reason, {})[name] = None
        return None

    def _is_beside(self, words: str) -> bool:
        """Check whether a flag of another project is written with these values."""
        return any(_join(name, values) == words for name, _, values in self._theirs)

    def _drop(self, flag: Flag, values: list[str]) -> None:
        """Drop a flag without effect, or one that is refused unless its value asks for what holds anyway."""
        flag.check_count(values, flag.name)
        is_idle = not flag.is_switch and flag.allowed is not None and flag.accepts(flag.read(values))
        if is_idle:
            self._result.idle.append(flag.name)
        elif flag.kind is Kind.IGNORED:
            self._result.ignored.setdefault(flag.remedy, {})[flag.name] = None
        else:
            raise UsageError(f"{_join(flag.name, values)} is refused: {flag.remedy}")

    def _mean(self, ours: str, new: _Meant) -> None:
        """Give a flag of ours what another flag means, unless one of ours is written or another one goes before."""
        old, source = self._meant.get(ours), new.origin.source
        own = [self._targets.get(target) for target in self._known[ours].targets]
        if all(own):
            if new.is_main and self._own.get(ours) != new.values:
                self._result.notes.append(f"{source} is overruled by {own[0]}, which is written itself")
        elif old is None or new.is_main or not old.is_main:
            if old is not None and old.is_main and old.values != new.values:
                self._result.notes.append(f"{old.origin.source} is overruled by {source}, which comes later")
            self._meant[ours] = new

    def _settle_divergence(self) -> None:
        """Settle the meaning of slime's flags of a divergence in the loss, which count only together."""
        refused = {refusal.name for refusal in self._result.refusals}
        written = {name: values for name, _, values in self._theirs if name in DIVERGENCE and name not in refused}
        weight, notes = self._meant.get(_BETA), self._result.notes
        if weight is not None and "--use-kl-loss" not in written:
            notes.append(f"{weight.origin.source} has no effect without --use-kl-loss, as in slime")
            del self._meant[_BETA]
            weight = None
        kinds = [Origin(_join(name, written[name]), name) for name in DIVERGENCE[2:] if name in written]
        beta = self._own.get(_BETA) if weight is None else weight.values
        if not beta or _is_zero(beta[0]):
            if kinds:
                notes.append(f"{', '.join(kind.source for kind in kinds)} has no effect without a weight above 0")
            return
        if _ESTIMATOR in self._own or not (kinds or weight):
            return
        (kind,), is_unbiased = written.get("--kl-loss-type", ["k1"]), "--use-unbiased-kl" in written
        if is_unbiased and kind == "k2":
            error = "--use-unbiased-kl with --kl-loss-type k2 has no estimator here: write --kl-loss-type k3"
            self._result.refusals.append(RefusedFlag("--kl-loss-type", error, error))
            return
        # A divergence that is weighted by the ratio has the same mean gradient with k1 as with k3.
        estimator = "unbiased" if is_unbiased else "k3" if kind == "low_var_kl" else kind
        default = Origin("--kl-loss-type k1, which is slime's default", "--kl-loss-type")
        self._meant[_ESTIMATOR] = _Meant([estimator], kinds[-1] if kinds else default)

    def _imply(self) -> dict[str, _Meant]:
        """Return the flags that other projects' scripts imply, and note them by project."""
        written = self._own.keys() | {name for name, _, _ in self._theirs}
        set_targets = {*self._targets, *(target for name in self._meant for target in self._known[name].targets)}
        implied: dict[str, _Meant] = {}
        for project in read_projects():
            is_theirs = not written.isdisjoint(project.signs)
            texts = {text for name, text in project.implied_by.items() if name in written}
            if is_theirs:
                texts |= {text for text, unless in project.implies.items() if written.isdisjoint(unless.split())}
            besides = [
                text for words, entry in project.beside.items() if self._is_beside(words) for text in entry["implies"]
            ]
            said = []
            for text in (
                *(text for text in (*project.implies, *project.implied_by.values()) if text in texts),
                *besides,
            ):
                name, *values = text.split()
                followed = project.follows.get(name, "")
                meant = self._meant.get(followed)
                values = (self._own.get(followed) if meant is None else [*meant.values]) or values
                if not set(self._known[name].targets) <= set_targets:
                    said.append(_join(name, values))
                    implied[name] = _Meant(values, Origin(f"{project.title} implies {said[-1]}"))
            if said:
                reason = f"taken as {project.title}'s, whose runs have"
                reason = reason if is_theirs else f"{project.title}'s flags imply"
                self._result.notes.append(f"{reason} {', '.join(said)}")
        return implied


def _list_meanings(name: str, entry: Any, values: list[str]) -> dict[str, list[str]]:
    """Return the flags of ours that a flag of another project means, each with its values."""
    if isinstance(entry, list):
        return dict.fromkeys(entry, values)
    if isinstance(entry, Mapping):
        choices = [choice for choice in entry if choice != "else"]
        _check_values(name, choices, values, entry["else"])
        entry = entry[values[0]]
    elif " " in entry:
        _check_values(name, None, values)
    ours, *fixed = entry.split()
    return {ours: fixed or values}


def _check_values(name: str, choices: Sequence[str] | None, values: list[str], remedy: str = "") -> None:
    """Raise a UsageError unless a flag has one of these choices, or no value if it has no choices."""
    flag = Flag(name=name, convert=str if choices else None, choices=tuple(choices or ()), remedy=remedy)
    flag.check_count(values, name)
    flag.read(values)


def _join(name: str, values: Sequence[str]) -> str:
    return " ".join((name, *values))


def _is_zero(text: str) -> bool:
    try:
        return float(text) == 0
    except ValueError:
        return False
