"""Settings and flags as text: --print-config, a run's records, and docs/flags.md."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from megatron_rl.algorithm.plug_ins import describe_plug_ins
from megatron_rl.command_line import resolve
from megatron_rl.command_line.flags import find_other_defaults, list_flags
from megatron_rl.command_line.other_projects import Project, read_projects
from megatron_rl.command_line.run import RunSettings
from megatron_rl.config.settings import DraftSettings, Subjects
from megatron_rl.flag import Flag, Kind, derive_flags, format_value, index_by_name, names_function
from megatron_rl.observe.run_folder import SavedConfig, Value
from megatron_rl.platforms.megatron_configs import find_megatron_version
from megatron_rl.rewards.model_folders import CLASSIFIER, JUDGE, hash_folder
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.shared.weights.families import describe_guest
from megatron_rl.shared.weights.mapping import measure_model
from megatron_rl.sidecar.settings import SidecarSettings

# The name of a value, the value, and its origin.
Row = tuple[str, str, str]
# Subjects whose flags decide what is rewarded and how the policy learns from it; None stands for all but _NO_OBJECTIVE.
_OF_OBJECTIVE: dict[str, frozenset[str] | None] = {
    "algorithm": None,
    "sampling": None,
    "environment": frozenset({"source", "max_turns", "on_error", "agent", "verifiers", "gateway_advises"}),
    "reward": frozenset({"functions", "on_error", "model_device"})
    | {f"judge_{name}" for name in ("prompt", "pattern", "default", "max_tokens", "max_num_seqs", "vllm_args")},
}
# Metrics change nothing, and the weights of frozen models are compared by their fingerprints.
_NO_OBJECTIVE = frozenset({"metrics", "ref_model", "teacher", "critic", "roles"})


def print_config(settings: RunSettings) -> str:
    """Return every value with its origin: a flag, the Hugging Face folder, or a default."""
    lines = [f"platform = {settings.platform}"]
    sections = {title: list(rows) for title, rows in _list_values(settings)}
    if settings.sidecar is not None and (rows := list(_list_sidecar_rows(settings, settings.sidecar))):
        sections["sidecar"] = rows
    for title, found in sections.items():
        lines += ["", f"[{title}]"]
        width = max(len(name) for name, _, _ in found)
        value_width = min(max(len(value) for _, value, _ in found), 40)
        lines += [f"{name:<{width}} = {value:<{value_width}}  # {source}" for name, value, source in found]
    lines += ["", *(f"note: {note}" for note in settings.notes)]
    return "\n".join(lines).rstrip() + "\n"


def describe_run(settings: RunSettings, has_own_model: bool = True) -> SavedConfig:
    """Return the same values for the run's folder, with the other facts that its figures need.

    A recipe's model is not the command line's own.
    """
    rollout, of_values = settings.rollout, dict(_list_values(settings))
    is_own = settings.sidecar is not None and rollout.engine == "vllm"
    return SavedConfig(
        platform=settings.platform,
        num_devices=settings.world_size,
        num_engine_devices=rollout.num_engines * rollout.tensor_parallel_size if is_own else None,
        model=measure_model(settings.architecture),
        sections={
            title: {name: Value(value, source) for name, value, source in rows} for title, rows in of_values.items()
        },
        words=settings.words if has_own_model else (),
    )


def _list_values(settings: RunSettings) -> Iterator[tuple[str, Iterator[Row]]]:
    yield "architecture", _list_architecture_rows(settings)
    for name in get_type_hints(Subjects):
        yield name, _list_rows(name, getattr(settings, name), settings.sources)
    for name in resolve.SUBJECTS:
        yield name, _list_built_rows(name, getattr(settings, name), settings.sources)
    if plug_ins := describe_own_files(settings):
        yield "plug-ins", ((label, sha256, "sha256 of the file") for label, sha256 in plug_ins.items())
    yield "iteration", _list_iteration_rows(settings)


def _list_rows(subject: str, config: Any, sources: Mapping[str, str]) -> Iterator[Row]:
    for field in dataclasses.fields(config):
        yield field.name, _write_cell(getattr(config, field.name)), sources.get(f"{subject}.{field.name}", "default")


def _list_built_rows(subject: str, config: Any, sources: Mapping[str, str]) -> Iterator[Row]:
    """Yield the fields of one of megatron-core's configurations, those that are not defaults first."""
    rows: dict[bool, list[Row]] = {True: [], False: []}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if callable(value) and not isinstance(value, type):
            continue
        source = sources.get(f"{subject}.{field.name}")
        is_default = source is None and value == field.default
        if source is None:
            source = "default of megatron-core" if is_default else "follows from the model and the other values"
        rows[is_default].append((field.name, _write_cell(value), source))
    yield from sorted(rows[False])
    yield from sorted(rows[True])


def _list_architecture_rows(settings: RunSettings) -> Iterator[Row]:
    origin = settings.sources.get("architecture", "default")
    for path, value in _list_leaves("", settings.architecture):
        source = settings.sources.get(f"architecture.{path}", origin)
        yield path, _write_cell(value), source


def _list_sidecar_rows(settings: RunSettings, sidecar: SidecarSettings) -> Iterator[Row]:
    """Yield the values of the run's sidecar that differ from those of the section rollout."""
    for field in dataclasses.fields(sidecar.rollout):
        value = getattr(sidecar.rollout, field.name)
        if value != getattr(settings.rollout, field.name):
            yield f"rollout.{field.name}", _write_cell(value), "follows from the run's other values"


def _list_iteration_rows(settings: RunSettings) -> Iterator[Row]:
    sizes, division = settings.sizes, settings.sizes.division
    ranks = "the ranks of the launcher" if settings.world_size is not None else "no launcher says how many there are"
    yield "num_replicas", _write_cell(sizes.plan.num_replicas), ranks
    follows = "follows from the batch sizes"
    yield "prompts_per_update", _write_cell(division.prompts_per_update), follows
    yield "updates", _write_cell(sizes.plan.num_updates), follows
    yield "micro_batches_per_update", _write_cell(division.slots_per_update), follows + ", of a replica"
    yield "longest_prompt", _write_cell(sizes.longest_prompt), "follows from the lengths"
    yield "longest_response", _write_cell(sizes.longest_response), "follows from the lengths"
    yield "largest_micro_batch", _write_cell(sizes.largest_micro_batch), "tokens, padding counted in"
    yield "threads_of_rank", _write_cell(settings.cores.threads_of_rank), "a share of the host's cores, on a CPU"
    yield "folder", _write_cell(settings.folder), "--rollout-folder, or follows from --save"


def _list_leaves(prefix: str, value: Any) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _list_leaves(f"{prefix}{field.name}.", inner)
        else:
            yield prefix + field.name, inner


def _write_cell(value: object) -> str:
    return "-" if value is None else format_value(value)


_INTRODUCTION = """\
# Flags

Generated by `make flags` for megatron-core {version}; do not edit.

Flags have Megatron's names. Write them in full, each followed by its value. If a flag is given twice, the last counts.
All mistakes in a command line are reported together, a line each with the remedy, and the exit code is 2.
`--print-config` prints the configurations of the run, each value with its origin.
`python -m megatron_rl.config FLAGS` checks the command line of a run, and the paths that it names, without running
anything. Rows, weights and checkpoints are read when the run starts, and their faults are reported then.

With `--hf-model` the architecture comes from the folder's config.json, and flags that describe the model must agree
with it. Without it, these flags describe the model, as in Megatron's scripts.
"""


def write_flags_page() -> str:
    """Return docs/flags.md, for the installed megatron-core."""
    flags = list_flags()
    used = [flag for flag in flags if flag.kind is Kind.USED]
    lines = [
        _INTRODUCTION.format(version=find_megatron_version()),
        "## Of this package",
        "",
        *_write_table(flag for flag in used if not flag.megatron),
        "",
        "## Of Megatron, used",
        "",
        *_write_sections(flag for flag in used if flag.megatron),
        "## Of Megatron, without effect here",
        "",
        "They are accepted, and a note at the start names them.",
        "",
        *_write_lists(flag for flag in flags if flag.kind is Kind.IGNORED),
        "## Of Megatron, refused",
        "",
        "A value in brackets changes nothing, and is accepted.",
        "",
        *_write_lists(flag for flag in flags if flag.kind is Kind.REFUSED),
        "## Defaults that differ from Megatron's",
        "",
        *_write_defaults(),
        "",
        *_write_projects(index_by_name(flags)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _write_defaults() -> Iterator[str]:
    """Yield the defaults of flags that Megatron's scripts know too, where the two differ."""
    yield "A run says at the start how many of them it uses; with `--verbose` it lists them."
    yield ""
    yield "| flag | here | in Megatron's scripts |"
    yield "| --- | --- | --- |"
    for name, (own, theirs) in sorted(find_other_defaults().items()):
        yield f"| `{name}` | {own} | {theirs} |"


def _write_projects(known: Mapping[str, Flag]) -> Iterator[str]:
    yield "## Of other projects"
    yield ""
    yield "Launch scripts of these projects start unchanged: their flags are rewritten before the command line is read."
    yield "Notes at the start say how. A flag of this package overrules them."
    yield ""
    for project in read_projects():
        yield from (f"### {project.title}", "")
        yield from _write_implied(project)
        rewritten = [name for name in (*project.same, *project.together, *project.conditions) if name not in known]
        if rewritten:
            yield from ("| flag | taken as |", "| --- | --- |")
            yield from (f"| `{name}` | {project.describe(name)} |" for name in rewritten)
            yield ""
        if project.prefixes:
            names = ", ".join(f"`{prefix}...`" for prefix in project.prefixes)
            yield from (f"Without effect, because {project.prefix_reason}: {names}", "")
        for title, kind in (("Without effect:", Kind.IGNORED), ("Refused:", Kind.REFUSED)):
            unused = [flag for flag in project.unused.values() if flag.kind is kind and flag.name not in known]
            if unused:
                yield from (title, "", *_write_lists(unused))


def _write_implied(project: Project) -> Iterator[str]:
    if not project.implies:
        return
    implied = ", ".join(f"`{words}`" for words in project.implies)
    signs = ", ".join(f"`{sign}`" for sign in project.signs)
    yield from (f"Any of {signs} implies {implied}.", "")
    yield from (f"`{name}` implies `{words}`." for name, words in project.implied_by.items())
    yield from (f"`{name}` has the value of `{other}`, if that is written." for name, other in project.follows.items())
    for name, entry in project.beside.items():
        if entry["implies"]:
            yield f"`{name}` implies {', '.join(f'`{text}`' for text in entry['implies'])}."
    yield ""


_TITLES = {
    "model": "The model",
    "architecture": "The model",
    "described": "The model",
    "layout": "Parallelism, precision and kernels",
    "transformer": "Parallelism, precision and kernels",
    "optimizer": "The optimizer",
    "ddp": "Gradients",
}


def _write_sections(flags: Iterable[Flag]) -> Iterator[str]:
    sections: dict[str, list[Flag]] = {}
    for flag in flags:
        subject = flag.targets[0].partition(".")[0] if flag.targets else "described"
        sections.setdefault(_TITLES.get(subject, subject.capitalize()), []).append(flag)
    for title, members in sections.items():
        yield from (f"### {title}", "", *_write_table(sorted(members, key=lambda flag: flag.name)), "")


def _write_table(flags: Iterable[Flag]) -> Iterator[str]:
    yield "| flag | without it | meaning |"
    yield "| --- | --- | --- |"
    for flag in flags:
        names = ", ".join(f"`{name}`" for name in flag.names)
        value = f" `{flag.value_text()}`" if flag.value_text() else ""
        meaning = flag.help
        if flag.allowed is not None:
            meaning += f" Only {' or '.join(format_value(item) for item in flag.allowed)}: {flag.remedy}."
        yield f"| {names}{value} | {_write_default(flag)} | {meaning} |"


def _write_default(flag: Flag) -> str:
    if flag.is_switch:
        return "on" if flag.default else "off" if flag.const is True else ""
    return "" if flag.default is None else format_value(flag.default)


def _write_lists(flags: Iterable[Flag]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for flag in flags:
        harmless = [] if flag.allowed is None else [format_value(item) for item in flag.allowed if item is not None]
        accepted = f" [{' or '.join(dict.fromkeys(harmless))}]" if harmless else ""
        by_reason.setdefault(flag.remedy, []).append(f"`{flag.name}`{accepted}")
    for reason, names in by_reason.items():
        yield from (f"**{reason[0].upper()}{reason[1:]}.**", ", ".join(sorted(names)), "")


def describe_own_files(settings: DraftSettings) -> dict[str, str]:
    """Map each flag with its FILE.py:NAME to the hash of the file."""
    return describe_plug_ins(settings.algorithm) | describe_guest(settings.model.weights_bridge)


def describe_objective(settings: DraftSettings) -> dict[str, str]:
    """Map each flag of the objective to its value, and each file that they name to its hash."""
    if settings.run.stage in ("sft", "serve"):
        return {}
    if settings.run.stage == "dpo":
        flags = derive_flags(type(settings.preference), "preference")
        return {
            flag.name: format_value(value)
            for flag, value in zip(flags, vars(settings.preference).values(), strict=True)
        }
    return dict(_list_objective(settings)) | {str(path): text for path, text in _list_hashes(settings)}


def _list_objective(settings: DraftSettings) -> Iterator[tuple[str, str]]:
    for subject, names in _OF_OBJECTIVE.items():
        config = getattr(settings, subject)
        for flag, field in zip(derive_flags(type(config), subject), dataclasses.fields(config), strict=True):
            value = getattr(config, field.name)
            if field.name in _NO_OBJECTIVE or (names is not None and field.name not in names):
                continue
            if flag.is_switch:
                yield flag.name, "on" if value == flag.const else "off"
            else:
                yield flag.name, "not given" if value is None else format_value(value)


def _list_hashes(settings: DraftSettings) -> Iterator[tuple[Path, str]]:
    """Yield files and models of rewards, agents and environments, with hashes; one on another host has none."""
    specs = parse_specs(settings.reward.functions or (), settings.reward.timeout)
    named = (settings.environment.source, settings.environment.agent)
    others = [source.rpartition(":")[0] for source in named if source is not None and names_function(source)]
    question = settings.reward.judge_prompt
    for path in [
        *(spec.source for spec in specs if spec.is_file),
        *others,
        *([] if question is None else [str(question)]),
    ]:
        with contextlib.suppress(OSError):
            yield Path(path), f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"
    for folder in [Path(str(spec.argument)) for spec in specs if spec.source in (CLASSIFIER, JUDGE)]:
        with contextlib.suppress(OSError):
            yield folder, f"blake3 {hash_folder(folder)[:12]}"
