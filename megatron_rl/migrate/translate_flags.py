"""The command line of this package for a run of slime or Megatron-LM, whose scripts write flags.

Megatron's flags are ours; those of slime and others are rewritten as a run rewrites them. Here a flag that a run would
refuse is listed.
"""

from collections.abc import Mapping, Sequence

from megatron_rl.command_line.other_projects import DIVERGENCE, Rewritten, find_project, rewrite
from megatron_rl.errors import InputError
from megatron_rl.flag import Flag, Kind
from megatron_rl.migrate.launch_command import group_words, read_launcher
from megatron_rl.migrate.translation import Translation, index_flags, place_devices

# Flags that choose a reward.
_REWARDS = ("--rm-type", "--rm-url", "--custom-rm-path")
# Flags of evaluations, each with the flag of training whose value it has here.
_EVALUATED = {"--eval-max-response-len": "--rollout-max-response-len", "--eval-top-p": "--rollout-top-p"}
_FILTER = "check_reward_nonzero_std"
# Flags of ours that settle what a refused flag asks for.
_SETTLED_BY = {"--advantage-estimator": ("--grpo-loss", "--algorithm")}


def translate_flags(head: Sequence[str], words: Sequence[str], script: object) -> Translation:
    """Translate the words after a launcher's; raise an InputError if none of them is a known flag."""
    known, written = index_flags(), dict(group_words(words))
    projects = [project.title for name in written if name not in known and (project := find_project(name))]
    if not projects and known.keys().isdisjoint(written):
        raise InputError(f"{script} starts {head[-1]} without a known flag: write one of slime or Megatron-LM")
    to = Translation(max(projects, key=projects.count) if projects else "Megatron-LM")
    is_slime = to.source == "slime"
    left = dict(written)
    if is_slime:
        _carry_rewards(left, to)
        left.pop("--num-steps-per-rollout", None)
    rewritten = rewrite([word for name, values in left.items() for word in (name, *values)], known)
    _carry_flags(rewritten, to)
    if is_slime:
        _drop_divergence(written, rewritten, to)
        _check_defaults(written, to)
        _carry_batches(written, to)
    _place(head, written, to, is_slime)
    return to


def _carry_rewards(left: dict[str, list[str]], to: Translation) -> None:
    """Carry over slime's flags of rewards and evaluations, and remove them from those that are left."""
    for name in sorted(set(left) & {*_REWARDS, *_EVALUATED, "--eval-prompt-data", "--dynamic-sampling-filter-path"}):
        values, source = left[name], " ".join((name, *left[name]))
        if name in _REWARDS:
            to.require(
                f"{source} chooses slime's reward: write --reward FILE.py:NAME, or a ready-made one (docs/rewards.md)",
                "--reward",
            )
        elif name == "--eval-prompt-data":
            # Names alternate with files; one value alone is a file.
            to.write("--eval-prompts", *(values[1::2] or values))
        elif name == "--dynamic-sampling-filter-path" and values and values[0].endswith(_FILTER):
            to.write("--grpo-filter-groups-with-same-reward")
        elif name in _EVALUATED and values != (left.get(_EVALUATED[name]) or ["1"]):
            to.changed.append(
                f"{source}: an evaluation's responses are as long as others, and from the whole distribution"
            )
        else:
            continue
        del left[name]


def _carry_flags(rewritten: Rewritten, to: Translation) -> None:
    """Carry over the flags that have an effect here, and name the others."""
    known = index_flags()
    for name, values in group_words(rewritten.words):
        flag, source = known.get(name), " ".join((name, *values))
        if flag is None:
            to.changed.append(f"{source}: this package has no such flag")
        elif flag.kind is Kind.USED:
            to.words[name] = values
        elif flag.kind is Kind.REFUSED and (flag.is_switch or not _is_accepted(flag, values)):
            to.changed.append(f"{source}: {flag.remedy}")
        else:
            to.meaningless.append(name)
    to.meaningless += (name for names in rewritten.ignored.values() for name in names)
    to.meaningless += rewritten.idle
    for refusal in rewritten.refusals:
        if refusal.name in _SETTLED_BY:
            to.require(refusal.reason, *_SETTLED_BY[refusal.name])
        else:
            to.changed.append(refusal.reason)


def _is_accepted(flag: Flag, values: Sequence[str]) -> bool:
    return flag.accepts(flag.read(values) if flag.nargs is not None or len(values) == 1 else None)


def _drop_divergence(written: Mapping[str, list[str]], rewritten: Rewritten, to: Translation) -> None:
    """Drop slime's divergence in the loss if it has no weight, and name it if its gradient has no mean."""
    names = ("--grpo-kl-beta", "--grpo-kl-estimator")
    theirs = [name for name in names if name in rewritten.origins]
    weight = to.words.get("--grpo-kl-beta", [""])[0]
    if weight.strip("0.") == "":
        to.meaningless += (name for name in DIVERGENCE if name in written)
    elif to.words.get("--grpo-kl-estimator") == ["k1"]:
        kind = "--kl-loss-type k1" if "--kl-loss-type" in written else "k1, the default of --kl-loss-type"
        to.changed.append(
            f"--kl-loss-coef {weight} with {kind}: the mean of its gradient is 0, so it is left out; write "
            f"--grpo-kl-beta {weight} for a divergence that holds the policy"
        )
    else:
        return
    for name in theirs:
        del to.words[name]


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


def _check_defaults(written: Mapping[str, list[str]], to: Translation) -> None:
    """Name the defaults of slime's that are not carried over."""
    if to.words.get("--grpo-advantage") == ["gae"]:
        # Responses are compared with the critic's values.
        return
    if "--disable-grpo-std-normalization" not in written and "--algorithm" not in written:
        to.changed.append(
            "the advantages: slime divides by the sample's deviation, this package by the population's, which "
            "makes advantages of n responses larger by the root of n / (n - 1)"
        )
    if "--n-samples-per-prompt" not in written and "--grpo-group-size" not in written:
        del to.words["--grpo-group-size"]
        to.require(
            "--n-samples-per-prompt is missing, and slime's default is 1, which leaves none to compare with: write "
            "--grpo-group-size, the responses to a prompt",
            "--grpo-group-size",
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
