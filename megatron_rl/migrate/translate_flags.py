"""The command line of this package for a run of slime or Megatron-LM, whose scripts write flags.

Megatron's flags are ours; those of slime and others have an entry in the table of flags.
"""

from collections.abc import Iterable, Mapping, Sequence

from megatron_rl.command_line import flags
from megatron_rl.command_line.projects import choose_estimator, list_implied
from megatron_rl.errors import InputError, UsageError
from megatron_rl.flag import Flag, Kind
from megatron_rl.migrate.launch_command import group_words, read_launcher
from megatron_rl.migrate.translation import Translation, index_flags, place_devices

_DIVERGENCE = ("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--use-unbiased-kl")
# Flags that are carried over together with others.
_TOGETHER = (*_DIVERGENCE, "--num-steps-per-rollout", "--eval-prompt-data")
# Flags that choose a reward.
_REWARDS = ("--rm-type", "--rm-url", "--custom-rm-path")
# Flags of evaluations, each with the flag of training whose value it has here.
_EVALUATED = {"--eval-max-response-len": "--rollout-max-response-len", "--eval-top-p": "--rollout-top-p"}
_FILTER = "check_reward_nonzero_std"


def translate_flags(head: Sequence[str], words: Sequence[str], script: object) -> Translation:
    """Translate the words after a launcher's; raise an InputError if none of them is a known flag."""
    known, written = index_flags(), dict(group_words(words))
    if known.keys().isdisjoint(written):
        raise InputError(f"{script} starts {head[-1]} without a known flag: write one of slime or Megatron-LM")
    projects = [flag.project for name in written if (flag := known.get(name)) and flag.project]
    to = Translation(max(projects, key=projects.count) if projects else "Megatron-LM")
    is_slime = to.source == "slime"
    _carry_flags({name: values for name, values in written.items() if not is_slime or name not in _TOGETHER}, to)
    if is_slime:
        _carry_divergence(written, to)
        _carry_batches(written, to)
        if "--disable-grpo-std-normalization" not in written and "--algorithm" not in written:
            to.changed.append(
                "the advantages: slime divides by the sample's deviation, this package by the population's, which "
                "makes advantages of n responses larger by the root of n / (n - 1)"
            )
        if "--eval-prompt-data" in written:
            values = written["--eval-prompt-data"]
            # Names alternate with files; one value alone is a file.
            to.write("--eval-prompts", *(values[1::2] or values))
    for project in flags.list_projects().values():
        if project["title"] == to.source:
            for name, values in list_implied(project, written).items():
                to.words.setdefault(name, values)
    if is_slime and "--n-samples-per-prompt" not in written and "--grpo-group-size" not in written:
        del to.words["--grpo-group-size"]
        to.require(
            "--n-samples-per-prompt is missing, and slime's default is 1, which leaves none to compare with: write "
            "--grpo-group-size, the responses to a prompt",
            "--grpo-group-size",
        )
    _place(head, written, to, is_slime)
    return to


def _carry_flags(written: Mapping[str, list[str]], to: Translation) -> None:
    known = index_flags()
    prefixes = tuple(_list_prefixes())
    meant: dict[str, list[str]] = {}
    for name, values in written.items():
        flag, source = known.get(name), " ".join((name, *values))
        if flag is None and name.startswith(prefixes):
            to.meaningless.append(name)
        elif flag is None:
            to.changed.append(f"{source}: this package has no such flag")
        elif name in _REWARDS:
            to.require(
                f"{source} chooses slime's reward: write --reward FILE.py:NAME, or a ready-made one (docs/rewards.md)",
                "--reward",
            )
        elif name in _EVALUATED and values != (written.get(_EVALUATED[name]) or ["1"]):
            to.changed.append(
                f"{source}: an evaluation's responses are as long as others, and from the whole distribution"
            )
        elif flag.kind is Kind.IGNORED:
            to.meaningless.append(name)
        elif name == "--dynamic-sampling-filter-path" and values and values[0].endswith(_FILTER):
            to.write("--grpo-filter-groups-with-same-reward")
        elif flag.kind is Kind.REFUSED and (flag.is_switch or not _is_accepted(flag, values)):
            to.changed.append(f"{source}: {flag.remedy}")
        elif flag.kind is Kind.REFUSED:
            to.meaningless.append(name)
        elif flag.means:
            meant[flag.means] = values
            _write_others(name, flag, values, meant)
        elif flag.renamed and not set(values) <= set(flag.choices):
            to.require(f"{source}: {flag.remedy}", "--grpo-loss", "--algorithm")
        else:
            to.words[name] = values
    to.words = {**meant, **to.words}


def _write_others(name: str, flag: Flag, values: list[str], meant: dict[str, list[str]]) -> None:
    """Write the further flags that a flag of another project means, unless one with that first meaning was written."""
    for project in flags.list_projects().values():
        names = project.get("same", {}).get(name, flag.means)
        for other in names[1:] if isinstance(names, list) else ():
            meant.setdefault(other, values)


def _list_prefixes() -> Iterable[str]:
    return (prefix for project in flags.list_projects().values() for prefix in project.get("prefixes", ()))


def _is_accepted(flag: Flag, values: Sequence[str]) -> bool:
    return flag.accepts(flag.read(values) if flag.nargs is not None or len(values) == 1 else None)


def _carry_divergence(written: Mapping[str, list[str]], to: Translation) -> None:
    """Carry over slime's divergence in the loss: its flags count only together."""
    weight = (written.get("--kl-loss-coef") or ["0"])[0]
    found = [name for name in _DIVERGENCE if name in written]
    if "--use-kl-loss" not in written or weight.strip("0.") == "":
        to.meaningless += found
        return
    kind = written.get("--kl-loss-type", [None])[0]
    try:
        estimator = choose_estimator("k3" if kind == "low_var_kl" else kind, "--use-unbiased-kl" in written)
    except UsageError as error:
        to.changed += error.problems
        return
    if estimator == "k1":
        to.changed.append(
            f"--kl-loss-coef {weight} with {'--kl-loss-type k1' if kind else 'k1, the default of --kl-loss-type'}: the "
            f"mean of its gradient is 0, so it is left out; write --grpo-kl-beta {weight} for a divergence that holds "
            "the policy"
        )
        return
    to.write("--grpo-kl-beta", weight)
    to.write("--grpo-kl-estimator", estimator)


def _carry_batches(written: Mapping[str, list[str]], to: Translation) -> None:
    """Carry over the number of updates of an iteration, as the size of an update."""
    steps = (written.get("--num-steps-per-rollout") or [""])[0]
    prompts, group = to.count("--grpo-prompts-per-step"), to.count("--grpo-group-size")
    if not steps or "--global-batch-size" in to.words:
        return
    if steps.isdigit() and prompts is not None and group is not None:
        to.write("--global-batch-size", prompts * group // int(steps))
    else:
        to.require(
            f"--num-steps-per-rollout {steps}: write --global-batch-size, the responses of an update",
            "--global-batch-size",
        )


def _place(head: Sequence[str], written: Mapping[str, list[str]], to: Translation, is_slime: bool) -> None:
    """Count the ranks that torchrun, or slime, starts."""
    told = read_launcher([*head, *(word for name, values in written.items() for word in (name, *values))])
    names = ("actor_num_gpus_per_node", "actor_num_nodes") if is_slime else ("nproc_per_node", "nnodes")
    per_node, nodes = (_read_count(told.get(name, "")) for name in names)
    per_node = per_node or (8 if is_slime else 1)
    is_shared = is_slime and "colocate" in told
    place_devices(to, nodes or 1, per_node, is_shared, _read_count(told.get("rollout_num_gpus", "")) or 0)


def _read_count(text: str) -> int | None:
    return int(text) if text.isdigit() else None
