"""The settings of a NeMo-RL run: YAML files that inherit from others and refer to each other's values, and overrides.

All values are texts, as in the files; a key has the names of its sections, with dots between them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.migrate.launch_command import read_overrides

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# The functions of two numbers that a value may call, as in `${mul:a,b}`.
_FUNCTIONS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": max,
}  # fmt: skip


PROGRAMS: Mapping[str, str] = {
    "ppo": "ppo_math_1B", "distillation": "distillation_math", "dpo": "dpo", "sft": "sft", "grpo": "grpo_math_1B",
}  # fmt: skip
"""The algorithms, each with the config that its program reads without --config. Of several the first counts."""
_SECTIONS = re.compile(r"^(defaults|policy|grpo|ppo|distillation|dpo|sft|rm|cluster):", re.MULTILINE)


def is_nemo_config(text: str) -> bool:
    return _SECTIONS.search(text) is not None


def find_nemo_config(program: Path, config: str, script: Path) -> Path:
    """Find the config of a program: by its path, or from a folder that the script is in."""
    if "$" in config:
        raise InputError(f"{script} has its shell find {config}: name the config itself, and its overrides after it")
    file = Path(config) if config else program.parent / "configs" / f"{PROGRAMS[program.stem[4:]]}.yaml"
    places = (folder / file for folder in (Path(), *script.absolute().parents))
    return next((place for place in places if place.is_file()), file)


def read_nemo_config(file: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Read a file with those that it inherits from, and its command line's overrides; raise an InputError if wrong."""
    tree = _load(file, ())
    for key in (word[1:].partition("=")[0] for word in overrides if word.startswith("~")):
        section, name = _find_place(tree, key)
        if isinstance(section, list) or name in section:
            del section[name]
    for key, text in read_overrides([word for word in overrides if not word.startswith("~")]).items():
        section, name = _find_place(tree, key)
        section[name] = _parse(text, key) if text[:1] in ("[", "{") else text
    return dict(_flatten(_References(tree, file).resolve_all((), ()), ""))


def _load(file: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    """Load a file over those in its `defaults`, of which later ones overrule earlier ones."""
    if file.resolve() in heirs:
        raise InputError(f"{file} inherits from itself: take it out of the `defaults` of {heirs[-1]}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): write the path of a NeMo-RL config") from error
    tree = _parse(text, file)
    if not isinstance(tree, dict):
        raise InputError(f"{file} must have `key: value` lines, as a NeMo-RL config does")
    parents = tree.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = _overrule(merged, _load(file.parent / str(parent), (*heirs, file.resolve())))
    return _overrule(merged, tree)


def _overrule(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge two files; a section of the second one with the key `_override_` replaces the first one's whole."""
    for key, value in new.items():
        if isinstance(value, dict) and str(value.pop("_override_", "")).lower() == "true":
            old.pop(key, None)
    return _merge(old, new)


def _merge(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merge(old.get(key), value) for key, value in new.items()}


def _parse(text: str, source: object) -> Any:
    """Parse YAML to dicts, lists and texts."""
    try:
        import yaml
    except ImportError:
        raise InputError(
            f"{source} is read with PyYAML, which is not installed: pip install 'megatron-rl[translate]'"
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return {} if node is None else _convert(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"{source} is not YAML ({' '.join(str(error).split())})") from error


def _convert(node: Any) -> Any:
    if node.id == "scalar":
        return node.value or ("null" if node.tag.endswith(":null") else "")
    if node.id == "sequence":
        return [_convert(item) for item in node.value]
    own: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag.endswith(":merge"):
            for part in reversed(value.value) if value.id == "sequence" else [value]:
                if part.id != "mapping":
                    raise ValueError(f"<< must merge sections, but has {part.value}")
                merged |= _convert(part)
        else:
            own[str(key.value)] = _convert(value)
    return merged | own


def _find_place(tree: Any, key: str) -> tuple[Any, Any]:
    """Return what has the last part of a key, and that part, in a list an index; missing sections are made."""
    name, _, rest = key.partition(".")
    index: Any = int(name) if isinstance(tree, list) and name.isdigit() else name
    if isinstance(tree, list) and index not in range(len(tree)):
        raise InputError(f"an override has {key} in a list of {len(tree)}: write a number below {len(tree)}")
    if not rest:
        return tree, index
    section = tree[index] if isinstance(tree, list) else tree.get(index)
    if not isinstance(section, dict | list):
        section = tree[index] = {}
    return _find_place(section, rest)


class _References:
    """The values of a tree, with what `${...}` stands for in its place."""

    def __init__(self, tree: dict[str, Any], file: Path):
        self.tree = tree
        self.file = file

    def resolve_all(self, at: tuple[str, ...], waiting: tuple[tuple[str, ...], ...]) -> Any:
        """Return the value at a path; `waiting` are the paths of the values that refer to it."""
        value = self._find(at)
        if isinstance(value, dict):
            return {name: self.resolve_all((*at, name), waiting) for name in value}
        if isinstance(value, list):
            return [self.resolve_all((*at, str(index)), waiting) for index in range(len(value))]
        if at in waiting:
            raise InputError(f"{self.file}: {'.'.join(at)} refers to itself: write its value, {'.'.join(at)}=VALUE")
        while (match := _INNERMOST.search(value)) is not None:
            meant = self._look_up(match[1].strip(), at, (*waiting, at))
            if match[0] == value.strip() or not isinstance(meant, str):
                return meant
            value = value.replace(match[0], meant)
        return value

    def _find(self, at: tuple[str, ...]) -> Any:
        value: Any = self.tree
        for name in at:
            value = value[int(name) if isinstance(value, list) else name]
        return value

    def _look_up(self, text: str, at: tuple[str, ...], waiting: tuple[tuple[str, ...], ...]) -> Any:
        name, colon, rest = text.partition(":")
        arguments = [part.strip() for part in rest.split(",")]
        dots = len(text) - len(text.lstrip("."))
        path = (*at[: len(at) - dots], *text[dots:].split(".")) if dots else (*text.split("."),)
        if name == "oc.env":
            # A shell expands it, as it does a script's.
            return arguments[1] if len(arguments) > 1 else f"${arguments[0]}"
        try:
            if colon:
                return f"{_FUNCTIONS[name](*map(float, arguments)):.10g}"
            self._find(path)
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
            raise InputError(
                f"{self.file}: {'.'.join(at)} refers to {text}, which is not known: write {'.'.join(at)}=VALUE"
            ) from None
        return self.resolve_all(path, waiting)


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield each setting; a list of texts is one, and the settings of a list of sections have their numbers."""
    is_listed = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    if is_listed or (isinstance(value, dict) and value):
        for name, item in enumerate(value) if is_listed else value.items():
            yield from _flatten(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        yield key, f"[{', '.join(map(str, value))}]"
    elif key:
        yield key, "{}" if value == {} else value
