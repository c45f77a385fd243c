"""Print the figures of the house, and report each that is above its bound in house.toml: part of make lint.

A change that raises a figure edits house.toml too, and its commit says why. `--lower` lowers bounds to the figures.
Circles of imports and imports of higher floors have no figure: tests/layering.py allows none.

python -m tools.check_house [--lower]
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.layering import PACKAGE, imports

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = Path(__file__).with_name("house.toml")
# A module with one importer and fewer lines may be a part of it.
_SMALL = 70
# What starts the processes of a run on one host.
_TRAINER = (f"{PACKAGE}.__main__",)
RUN = (*_TRAINER, f"{PACKAGE}.sidecar.main", f"{PACKAGE}.sidecar.vllm.api_server", f"{PACKAGE}.sidecar.vllm.worker")


class Package:
    """The modules of the package, with the lines of each and the modules that it imports."""

    def __init__(self, root: Path) -> None:
        paths = {_name_module(path): path for path in _list_files(root, f"{PACKAGE}/*.py")}
        texts = {name: (root / path).read_text(encoding="utf-8") for name, path in paths.items()}
        self.lines = {name: len(text.splitlines()) for name, text in texts.items()}
        self._is_folder = {name: path.name == "__init__.py" for name, path in paths.items()}
        self._imports = {
            name: {*self._list_with_folders(name), *self._find(ast.parse(text))} - {name}
            for name, text in texts.items()
        }

    def _find(self, tree: ast.Module) -> Iterable[str]:
        for found in imports(tree):
            if found.for_types:
                continue
            # The name of a module, or of something in it.
            yield from self._list_with_folders(found.module)

    def _list_with_folders(self, name: str) -> set[str]:
        """List a module and its folders, which are imported before it."""
        parts = name.split(".")
        return {".".join(parts[:count]) for count in range(1, len(parts) + 1)} & self.lines.keys()

    def list_imported(self, starts: Iterable[str]) -> set[str]:
        """List the modules that programs may import, with those that they start with."""
        found: set[str] = set()
        waiting = list(starts)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._imports[name]
        return found

    def list_small(self) -> list[str]:
        """List the modules of few lines that one module imports."""
        importers = Counter(name for names in self._imports.values() for name in names)
        return sorted(
            name
            for name, lines in self.lines.items()
            if lines < _SMALL and importers[name] == 1 and not self._is_folder[name]
        )


def measure(root: Path) -> dict[str, dict[str, int]]:
    """Measure all figures, by section."""
    package = Package(root)
    trainer, run = package.list_imported(_TRAINER), package.list_imported(RUN)
    rooms = Counter[str]()
    for name, lines in package.lines.items():
        rooms[".".join(name.split(".")[1:2]) or PACKAGE] += lines
    pages = [path for path in _list_files(root, "docs/*.md") if path.name not in ("flags.md", "changelog.md")]
    return {
        "package": {
            "files": len(package.lines),
            "lines": sum(package.lines.values()),
            "small_modules_with_one_importer": len(package.list_small()),
            "modules_of_the_trainer": len(trainer),
            "modules_of_a_run_on_one_host": len(run),
            "lines_of_a_run_on_one_host": sum(package.lines[name] for name in run),
        },
        "rooms": {name: rooms[name] for name in sorted(rooms)},
        "others": {
            "lines_of_tests": sum(len(_read_lines(root / path)) for path in _list_files(root, "tests/*.py")),
            "pages": len(pages),
            "words_of_pages": sum(len(re.findall(r"\S+", (root / path).read_text())) for path in pages),
            "lines_of_readme": len(_read_lines(root / "README.md")),
        },
    }


def compare(figures: Mapping[str, Mapping[str, int]], bounds: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Report the figures above their bounds, and those without one."""
    findings = []
    for section, values in figures.items():
        for name, value in values.items():
            most = bounds.get(section, {}).get(name)
            if most is None:
                findings.append(f"{section}.{name} is {value} and has no bound: add it to {BOUNDS.name}")
            elif value > most:
                findings.append(
                    f"{section}.{name} is {value}, above {most}: remove as much elsewhere, or raise the bound in "
                    f"{BOUNDS.name} and give the reason in the commit"
                )
    return findings


def write(figures: Mapping[str, Mapping[str, int]], bounds: Mapping[str, Mapping[str, int]]) -> str:
    """Write the bounds that these figures need, none above the bound that it has now."""
    text = "# The most that `python -m tools.check_house` allows; it lowers these with `--lower`.\n"
    for section, values in figures.items():
        text += f"\n[{section}]\n"
        for name, value in values.items():
            text += f"{name} = {min(value, bounds.get(section, {}).get(name, value))}\n"
    return text


def _name_module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _list_files(root: Path, pattern: str) -> list[Path]:
    """List files that git knows or could add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(name) for name in names if (root / name).is_file()]


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def main(words: list[str]) -> int:
    """Print the figures and the findings; return the exit code."""
    figures = measure(ROOT)
    bounds = tomllib.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    if "--lower" in words:
        BOUNDS.write_text(write(figures, bounds))
        bounds = tomllib.loads(BOUNDS.read_text())
    for section, values in figures.items():
        print(f"{section}: " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in values.items()))
    findings = compare(figures, bounds)
    print("\n".join(findings or ["0 findings"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
