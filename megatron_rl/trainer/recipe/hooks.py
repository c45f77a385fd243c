"""Functions that replace those of megatron.training while a recipe runs, in the order in which the script calls them.

- `parse_args`, `validate_args`: our parser is first, so that a mistake is found before a process group exists.
- `set_global_variables`: arguments, timers and writers are Megatron's.
- `core_transformer_config_from_args`: packs, our flags and our checks have the last word.
- `pretrain`: trains with GRPO.

One command line is for two parsers, ours and the recipe's. Each is given the flags that it knows.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl import platforms
from megatron_rl.command_line import parse as command_line
from megatron_rl.command_line.flags import list_flags, list_own_flags
from megatron_rl.command_line.other_projects import find_project, split_words
from megatron_rl.command_line.run import RunSettings
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.flag import index_by_name
from megatron_rl.platforms.megatron_configs import find_megatron_version
from megatron_rl.platforms.megatron_patches import Patch, expect_parameters, install_patches, replaced, unknown_megatron
from megatron_rl.trainer.loop.entry import Entry

# Megatron's checks of arguments ask a CUDA device for its generation. On some generations they require environment
# variables; on the newest they require none.
_DEVICE_GENERATION = 10
_CONFIG = "core_transformer_config_from_args"
# The parameters of `pretrain` in every known version.
_PRETRAIN = {"train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"}
# Flags that only the recipe's builder reads; our builder has its own layer, and refuses any other.
_OF_THE_BUILDER = {"--spec"}

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None
"""A recipe's function that adds its own flags."""


class Hooks:
    """The hooks of one process, and the settings that one hook keeps for the next."""

    def __init__(self, entry: Entry, words: Sequence[str]) -> None:
        """`words` are the flags of the command line, as they were written."""
        self._entry = entry
        self._words = list(words)
        self._platform = platforms.select(command_line.find_platform_name(self._words))
        self._settings: RunSettings | None = None
        self.exit_code: int | None = None
        """The exit code of the training; None until it has ended."""

    def install(self) -> None:
        """Install the hooks, before the script runs and before anything of Megatron is imported."""
        self._platform.install()
        check_one_tree()
        install_patches(self.patches())

    def patches(self) -> list[Patch]:
        return [
            Patch("set_global_variables", "megatron.training.global_vars", set_for_our_loop),
            Patch(_CONFIG, "megatron.training.argument_utils", self.settle_configs),
            Patch(_CONFIG, "megatron.training.arguments", self.settle_configs),
            Patch("parse_args, validate_args", "megatron.training.arguments", self.parse_both),
            Patch("pretrain", "megatron.training.training", self.train_instead),
        ]

    def parse_both(self, module: ModuleType) -> None:
        """Give the command line to both parsers: each takes its own flags, and those that both know."""
        parse = expect_parameters(module, "parse_args", "extra_args_provider", "ignore_unknown_args")
        validate = expect_parameters(module, "validate_args", "args", "defaults")
        if self._platform.device_type != "cuda":
            module.get_device_arch_version = lambda: _DEVICE_GENERATION  # type: ignore[attr-defined]

        def parse_args(extra_args_provider: ExtraArgs = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
            theirs = list_their_names(module, extra_args_provider)
            self._settings = self._entry.parse(lambda: parse_ours(self._words, theirs))
            if self._settings.run.print_config:
                raise SystemExit(self._entry.train(self._settings))
            return parse_theirs(parse, self._words, theirs, extra_args_provider)

        def validate_args(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> argparse.Namespace:
            with refusals():
                validate(args, defaults or {})
            for name, value in self._settled_args():
                if hasattr(args, name):
                    setattr(args, name, value)
            return args

        module.parse_args = parse_args  # type: ignore[attr-defined]
        module.validate_args = validate_args  # type: ignore[attr-defined]

    def settle_configs(self, module: ModuleType) -> None:
        """Set the fields that packs or our flags need to another value than Megatron derives from its arguments."""
        if getattr(getattr(module, _CONFIG, None), "__module__", None) != module.__name__:
            # Another module defines the function in this version.
            return
        stock = expect_parameters(module, _CONFIG, "args", "config_class")

        @functools.wraps(stock)
        def from_args(args: argparse.Namespace, config_class: type | None = None) -> Any:
            config = stock(args, config_class)
            for field, value in self._settled_fields():
                setattr(config, field, value)
            return config

        setattr(module, _CONFIG, from_args)

    def train_instead(self, module: ModuleType) -> None:
        """Make `pretrain` train with GRPO: the recipe's model, with our data, loss and loop."""
        signature = inspect.signature(module.pretrain)
        if missing := sorted(_PRETRAIN - set(signature.parameters)):
            raise unknown_megatron(
                f"megatron.training.pretrain takes ({', '.join(signature.parameters)}), without {', '.join(missing)}"
            )

        @functools.wraps(module.pretrain)
        def pretrain(*arguments: Any, **keywords: Any) -> None:
            from megatron_rl.trainer.recipe.model import MegatronTimers, Provided, build_recipe

            bound = signature.bind(*arguments, **keywords).arguments
            args = self._get_args(bound)
            assert self._settings is not None
            provided = Provided(bound.get("model_provider"), bound["model_type"], bound.get("cfg_container"))
            timers = MegatronTimers(args, self._settings.observe.log_interval)
            optimizer = copy.copy(self._settings.optimizer)
            optimizer.timers = timers.timers
            settings = dataclasses.replace(self._settings, optimizer=optimizer)
            self.exit_code = self._entry.train(settings, build_recipe(provided, args, timers, self._entry.say))

        module.pretrain = pretrain  # type: ignore[attr-defined]

    def _get_args(self, bound: Mapping[str, Any]) -> argparse.Namespace:
        """Return the recipe's arguments. The scripts of 0.16 and 0.17 have `pretrain` parse them."""
        from megatron.training import arguments, global_vars

        if "cfg_container" not in bound:
            args = arguments.parse_args(bound.get("extra_args_provider"))
            arguments.validate_args(args, bound.get("args_defaults"))
            global_vars.set_global_variables(args)
        return global_vars.get_args()

    def _settled_fields(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields of TransformerConfig that our flags, packs and the platform decide."""
        assert self._settings is not None
        for target in self._settings.sources:
            subject, _, field = target.partition(".")
            if subject == "transformer":
                yield field, getattr(self._settings.transformer, field)

    def _settled_args(self) -> Iterator[tuple[str, Any]]:
        """Yield the same as arguments, which choose the layer spec, and the sizes that Megatron asks its tokenizer."""
        from megatron_rl.trainer.mcore.model.gpt import padded_vocab_size

        assert self._settings is not None
        yield from self._settled_fields()
        vocab_size = self._settings.architecture.vocab_size
        divisible_by = self._settings.model.make_vocab_size_divisible_by
        yield "vocab_size", vocab_size
        yield "padded_vocab_size", padded_vocab_size(vocab_size, self._settings.parallel_sizes.tensor, divisible_by)


def set_for_our_loop(module: ModuleType) -> None:
    """Have Megatron open its writers on the first rank, which writes the metrics, instead of the last.

    No tokenizer is built: prompts are read with the tokenizer of --hf-model, and the recipe's need not exist.
    """
    stock = expect_parameters(module, "set_global_variables", "args", "build_tokenizer")

    def set_global_variables(args: argparse.Namespace, build_tokenizer: bool = True) -> None:
        rank = args.rank
        args.rank = args.world_size - 1 if rank == 0 else min(rank, args.world_size - 2)
        try:
            stock(args, build_tokenizer=False)
        finally:
            args.rank = rank

    module.set_global_variables = set_global_variables  # type: ignore[attr-defined]


def check_one_tree() -> None:
    """Raise a PlatformError unless megatron.training and megatron.core belong to one copy of Megatron.

    The platform must be installed; no module of Megatron need be imported.
    """
    training, core = _find("megatron.training"), _find("megatron.core")
    if core is None:
        raise PlatformError("megatron.core is not found: install megatron-core, or start in a Megatron-LM tree")
    if training is None:
        raise PlatformError(
            f"megatron.training is not found beside {core / 'core'}: start a script of a Megatron-LM tree, or put the "
            "tree on PYTHONPATH; up to 0.18 the wheel of megatron-core does not hold it"
        )
    if training != core:
        raise PlatformError(
            f"two copies of Megatron are on the path: megatron.core belongs to {core}, megatron.training to "
            f"{training}; put the tree {training.parent} first on PYTHONPATH, or uninstall the other copy"
        )


def _find(name: str) -> Path | None:
    """Return the folder that holds the package; None if the package is not found."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    # Links are not followed: a tree may borrow its core.
    return Path(next(iter(spec.submodule_search_locations))).absolute().parent


def parse_ours(words: Sequence[str], theirs: Collection[str]) -> RunSettings:
    """Parse our settings. Report the flags that neither parser knows, but not those that only the recipe knows."""
    ours = set(index_by_name(list_flags())) | {name for name in theirs if find_project(name) is not None}
    ours -= _OF_THE_BUILDER
    return command_line.parse_run(select_words(words, ours, theirs))


def parse_theirs(
    parse: Callable[..., argparse.Namespace], words: Sequence[str], theirs: Collection[str], extra: ExtraArgs
) -> argparse.Namespace:
    """Have Megatron's parser parse its flags, which it reads from `sys.argv`."""
    ours = index_by_name(list_own_flags())
    flags = select_words(words, theirs, ours)
    with replaced(sys, "argv", [sys.argv[0], *flags]), _errors_of_argparse():
        return parse(extra)


def list_their_names(module: ModuleType, extra: ExtraArgs) -> set[str]:
    """Return the flags of `megatron.training.arguments`, and those that the recipe adds."""
    parser = module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra is not None:
        parser = extra(parser)
    return {name for action in parser._actions for name in action.option_strings}


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn a failed assertion of Megatron about its arguments into a UsageError with its text."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        reason = str(error) or "an assertion without a text"
        raise UsageError(f"Megatron {find_megatron_version()} refuses the recipe's arguments: {reason}") from error


def select_words(words: Sequence[str], names: Collection[str], others: Collection[str]) -> list[str]:
    """Return the flags of `names` with their values, and the flags that are in neither list."""
    selected: list[str] = []
    for flag in split_words(words):
        name = flag[0].partition("=")[0]
        if name in names or name not in others:
            selected += flag
    return selected


@contextlib.contextmanager
def _errors_of_argparse() -> Iterator[None]:
    """Turn the error that argparse prints into a UsageError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as ended:
        if not ended.code:
            raise
        *_, last = said.getvalue().strip().splitlines() or [""]
        raise UsageError(f"Megatron's parser: {last.partition('error: ')[2] or last}") from None
    finally:
        if sys.exc_info()[0] is None:
            sys.stderr.write(said.getvalue())
