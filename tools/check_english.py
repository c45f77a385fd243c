"""Finds what is hard to read in the documents, and in the errors and helps of the package: make english

A report, not a gate. It knows three things: words that turn a sentence round ("is no", "whom", "that which"), sentences
of more than 35 words, and names that stand for two things. Read the text aloud after.
"""

import ast
import dataclasses
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 35
# Shorter strings are names and keys.
MIN_WORDS = 3
PHRASES = ("is no", "are no", "whom", "that which")
# What is generated, and read from the package instead.
GENERATED = ("docs/flags.md",)

_PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b(?! (?:longer|more)\b)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[A-Z`\"'(\[*0-9-])")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
_LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is hard to read, and where."""

    place: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.what}"


def check_tree(root: Path) -> list[Finding]:
    """The findings of a repository: its documents, the strings of its package, and its names."""
    found: list[Finding] = []
    for path in documents(root):
        found += check_markdown(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    sources = sorted((root / "megatron_rl").rglob("*.py"))
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    for place, tree in trees.items():
        found += check_strings(tree, place)
    return found + double_names(trees)


def documents(root: Path) -> list[Path]:
    """The pages that people wrote."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    pages += sorted((root / "examples").rglob("*.md"))
    return [path for path in pages if path.exists() and path.relative_to(root).as_posix() not in GENERATED]


def check_markdown(text: str, place: str) -> list[Finding]:
    """The findings of a page; code blocks are left out, and a cell of a table is a text of its own."""
    return [finding for line, paragraph in paragraphs(text) for finding in check_text(paragraph, place, line)]


def check_text(text: str, place: str, line: int) -> list[Finding]:
    """The findings of a paragraph or a message."""
    found = [Finding(place, line, f'says "{match[0]}"') for match in _PHRASE.finditer(text)]
    for sentence in _SENTENCE_END.split(text):
        words = sentence.split()
        # Without a comma or a full stop it is a list of names.
        if len(words) > MAX_WORDS and any(word.endswith((".", ",", ":", ";")) for word in words):
            found.append(Finding(place, line, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."))
    return found


def check_strings(tree: ast.AST, place: str) -> list[Finding]:
    """The findings of a module's errors and helps: of every string of some words but the docstrings of code."""
    return [finding for line, text in sorted(set(_texts(tree))) for finding in check_text(text, place, line)]


def double_names(trees: dict[str, ast.Module]) -> list[Finding]:
    """Public classes and functions of one name in two modules.

    Functions that the modules of one folder share are an interface, and `main` is everybody's.
    """
    places: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for place, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                places[kind, node.name].append((place, node.lineno))
    return [
        Finding(*where[0], f"{kind} {name} is also in {', '.join(place for place, _ in where[1:])}")
        for (kind, name), where in sorted(places.items())
        if len(where) > 1
        and (kind == "class" or (name != "main" and len({Path(place).parent for place, _ in where}) > 1))
    ]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, list items, headings and cells of a page, each with the number of its first line."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        is_cell = line.lstrip().startswith("|")
        if lines and (not line.strip() or is_cell or _LIST_ITEM.match(line) or line.startswith("#")):
            yield start, plain(" ".join(lines))
            lines = []
        if is_cell:
            for cell in line.strip().strip("|").split(" | "):
                yield number, plain(cell.strip())
        elif line.strip():
            start = start if lines else number
            lines.append(_LIST_ITEM.sub("", line).strip().lstrip("#> "))


def plain(text: str) -> str:
    """Markdown as it is read: a piece of code is one word, a link is its words."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return re.sub(r"\*{1,2}(\S(?:.*?\S)?)\*{1,2}", r"\1", text)


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings that a person may see, each with its line; of an f-string each value is one word."""
    skipped = {id(docstring) for docstring in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node)}
            parts = (str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if len(text.split()) > MIN_WORDS:
            yield node.lineno, plain(" ".join(text.split()))


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Those of modules, classes and functions. What stands under a field is the help of a flag, and stays."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def report(found: Iterable[Finding]) -> str:
    """One line a finding, then how many each place has."""
    found = list(found)
    counts = Counter(finding.place.split("/")[0] for finding in found)
    summary = ", ".join(f"{place} {count}" for place, count in counts.most_common())
    return "\n".join([*map(str, found), f"{len(found)} findings{': ' + summary if summary else ''}"])


if __name__ == "__main__":
    print(report(check_tree(ROOT if len(sys.argv) < 2 else Path(sys.argv[1]))))
