"""Read the pages that people read: their blocks of code, their links, and what they say of the package."""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator

from tests.processes import ROOT

PACKAGE = ROOT / "megatron_rl"
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"^[\w.-]+(/[\w.-]+)+/?$|^test_\w+\.py$")
_DOTTED = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/-])")
# Paths in a run's folder or in a model's, and files of other projects.
_ELSEWHERE = re.compile(
    r"^(logs|journal|SAVE|RUN|FOLDER|OUT|MODEL|sidecar\.log|group|model|run|build|reward|time|mismatch|tokens)/"
)

# Names that look like modules and are files.
_SUFFIXES = ("jsonl", "json", "log", "py", "md", "sh")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    page: str
    line: int
    language: str
    title: str | None
    """The name of the file that the block shows, if the page gives one."""
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands, one line each: continued lines joined, comments removed."""
        lines = self.text.replace("\\\n", " ").splitlines()
        stripped = (" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in lines)
        return [line for line in stripped if line]


def pages() -> list[str]:
    """Return the pages, as paths from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found += (ROOT / "examples").rglob("*.md")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the blocks of code of a page, in order."""
    text, found = read(page), []
    for match in _FENCE.finditer(text):
        language, _, rest = match[1].partition(" ")
        title = _TITLE.search(rest)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, title[1] if title else None, match[2]))
    return found


def commands_of(page: str) -> list[str]:
    """Return the commands of a page, in order."""
    return [command for block in blocks(page) if block.language == "bash" for command in block.commands]


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", read(page))


def broken_links(page: str) -> list[str]:
    """Return the links of a page that lead to nothing in this repository."""
    broken = []
    for target in _LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings are linked by."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unknown_names(page: str) -> list[str]:
    """Return the modules, files and functions of this repository that a page names but that do not exist."""
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    unknown = [span for span in spans if _PATH.match(span) and not _exists(span)]
    names = [name for span in spans for name in _DOTTED.findall(span)]
    for block in blocks(page):
        # In other languages the name before a dot may be any variable.
        found = _DOTTED.findall(block.text)
        names += [name for name in found if block.language == "text" or name.startswith("megatron_rl.")]
    return unknown + [name for name in names if not _is_defined(name)]


def _exists(path: str) -> bool:
    if _ELSEWHERE.match(path):
        return True
    if "/" not in path:
        return any((ROOT / "tests").rglob(path))
    return any((folder / path).exists() for folder in (ROOT, PACKAGE, *PACKAGE.glob("*")))


def _is_defined(name: str) -> bool:
    """Check that a dotted name is not ours, or exists: a module, a name in it, or a member of one of its classes."""
    words = name.removeprefix("megatron_rl.").split(".")
    if words[0] in _classes():
        return len(words) == 2 and any(words[1] in members for members in _classes()[words[0]])
    # A folder of a room is named with its room.
    is_inner = any(path.is_dir() and (path / "__init__.py").exists() for path in PACKAGE.glob(f"*/{words[0]}"))
    if is_inner and not (PACKAGE / f"{words[0]}.py").exists() and words[-1] not in _SUFFIXES:
        return False
    if not ((PACKAGE / words[0]).is_dir() or (PACKAGE / f"{words[0]}.py").exists()) or words[-1] in _SUFFIXES:
        return not name.startswith("megatron_rl.")
    for count in range(len(words), 0, -1):
        path = PACKAGE.joinpath(*words[:count])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.exists():
            return _defines(ast.parse(module.read_text(encoding="utf-8")), words[count:])
    return False


def _defines(tree: ast.Module | ast.ClassDef, words: list[str]) -> bool:
    if not words:
        return True
    for node in tree.body:
        if words[0] in _bound(node):
            return len(words) == 1 or not isinstance(node, ast.ClassDef) or _defines(node, words[1:])
    return False


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module or class binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


@functools.cache
def _classes() -> dict[str, list[set[str]]]:
    """Return the members of the package's classes, by the classes' names."""
    found: dict[str, list[set[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                own = {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                }
                found.setdefault(node.name, []).append(own | {name for part in node.body for name in _bound(part)})
    return found
