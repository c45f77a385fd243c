"""List sentences that are hard to read, in documents and in all text of Python files: part of make lint.

The checker knows phrases that have a plain word (GLOSSARY), sentences of more than 35 words, docstrings that begin
with the wrong part of speech, and names that stand for two things. It reads docstrings, comments, errors and helps.
It is silent about much that is hard to read: read the text aloud as well. PATHS limit the report to what is below them.

python -m tools.check_english [PATH ...]
"""

import ast
import dataclasses
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 35
# Shorter strings are names and keys.
MIN_WORDS = 3
# Phrases, and plain words for each.
GLOSSARY = {
    "is no": "is not, or must be",
    "are no": "are not, or must be",
    "whom": "two sentences",
    "that which": "the thing by its name",
    "so many": "the number, or the parameter's name",
    "as many as": "the number, or the parameter's name",
    "nobody": "no process, no user",
    "somebody": "the process or person by name",
    "goes on": "continues, resumes",
    "go on": "continue, resume",
    "went on": "continued, resumed",
    "going on": "continuing, running",
    "anew": "again",
    "behind": "after",
    "is there": "exists, has arrived",
    "are there": "exist, have arrived",
    "gets further": "makes progress",
    "get further": "make progress",
    "lets go of": "releases",
    "let go of": "release",
    "is of": "belongs to",
    "are of": "belong to",
    "mend": "fix, correct, repair",
    "mends": "fixes, corrects, repairs",
    "mended": "fixed, corrected, repaired",
    "without meaning": "without effect",
    "said once": "reported once",
    "take care": "note:, check",
    "do not believe": "unreliable, with the reason",
    "of one's own": "your own, user-defined",
    "a person's own": "your own, user-defined",
    "refused by name": "refused with an error",
    "fails by name": "fails with an error",
    "ends by name": "ends with an error",
}
# A function is a verb: its docstring does not begin with one of these. That it is an imperative is checked by ruff.
NO_VERBS = {
    *("A", "All", "An", "And", "Any", "As", "At", "Because", "Both", "But", "By", "Each", "Every", "For", "From"),
    *("Here", "How", "If", "In", "Into", "It", "Its", "No", "Nobody", "None", "Nothing", "Of", "On", "One", "Only"),
    *("Or", "Our", "So", "Such", "That", "The", "Their", "There", "These", "They", "This", "Those", "To", "Under"),
    *("What", "When", "Where", "Whether", "Which", "While", "Who", "Whose", "Why", "With", "Without"),
}
# A field is a noun: its docstring, and that of a property or a class, does not begin with one of these.
NO_NOUNS = {"From", "How", "If", "Into", "Of", "That", "What", "Which", "Who", "Whom", "Whose", "Why"}
# A page that is generated from texts of the package, and the tests of this checker.
SKIPPED = {"docs/flags.md", "tests/unit/test_check_english.py"}
SOURCES = ("megatron_rl", "examples", "benchmarks", "tests", "tools")

_PHRASE = re.compile(rf"\b({'|'.join(GLOSSARY)})\b(?! (?:longer|more)\b)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[A-Z`\"'(\[*0-9-])")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
_LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is hard to read, and where."""

    place: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.message}"


def check_tree(root: Path) -> list[Finding]:
    """Check a repository: its documents, all text of its Python files, and the names of its package."""
    found: list[Finding] = []
    for path in list_documents(root):
        found += check_markdown(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in list_sources(root)}
    for place, text in sources.items():
        found += check_source(text, place)
    return found + find_double_names(
        {place: ast.parse(text) for place, text in sources.items() if place.startswith("megatron_rl/")}
    )


def list_documents(root: Path) -> list[Path]:
    """List the pages that people wrote."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", root / "benchmarks" / "README.md"]
    pages += sorted((root / "docs").rglob("*.md"))
    pages += sorted((root / "examples").rglob("*.md"))
    return [path for path in pages if path.exists() and path.relative_to(root).as_posix() not in SKIPPED]


def list_sources(root: Path) -> list[Path]:
    """List the Python files."""
    paths = [*sorted(root.glob("*.py")), *(path for name in SOURCES for path in sorted((root / name).rglob("*.py")))]
    return [path for path in paths if path.relative_to(root).as_posix() not in SKIPPED]


def check_source(text: str, place: str) -> list[Finding]:
    """Check a Python file: its comments, its docstrings, and every other string of some words.

    Other strings of tests are data and programs, and are not read.
    """
    tree = ast.parse(text)
    texts = {*list_comments(text), *_list_docstring_texts(tree)}
    if not place.startswith("tests/"):
        texts |= set(_list_string_texts(tree))
    found = [finding for line, words in sorted(texts) for finding in check_text(words, place, line)]
    return sorted([*found, *check_docstrings(tree, place)], key=lambda finding: finding.line)


def check_docstrings(tree: ast.AST, place: str) -> list[Finding]:
    """Find docstrings of functions without a verb in front, and those of fields and classes that are not nouns."""
    found = []
    for node, docstring in _docstrings(tree):
        first = re.split(r"\W", docstring.value.strip(), maxsplit=1)[0]
        is_verb = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node)
        if first in (NO_VERBS if is_verb else NO_NOUNS):
            wanted = "a verb" if is_verb else "a noun phrase"
            found.append(Finding(place, docstring.lineno, f'a docstring begins with "{first}" and not with {wanted}'))
    return found


def check_markdown(text: str, place: str) -> list[Finding]:
    """Check a page; code blocks are left out, and a cell of a table is a text of its own."""
    return [finding for line, paragraph in paragraphs(text) for finding in check_text(paragraph, place, line)]


def check_text(text: str, place: str, line: int) -> list[Finding]:
    """Check a paragraph or a message."""
    found = [
        Finding(place, line, f'says "{match[0]}" ({GLOSSARY[match[0].lower()]})') for match in _PHRASE.finditer(text)
    ]
    for sentence in _SENTENCE_END.split(text):
        words = sentence.split()
        # Without a comma or a full stop it is a list of names.
        if len(words) > MAX_WORDS and any(word.endswith((".", ",", ":", ";")) for word in words):
            found.append(Finding(place, line, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."))
    return found


def find_double_names(trees: dict[str, ast.Module]) -> list[Finding]:
    """Find classes of one name in two modules, and functions of one name that are imported by it alone from two.

    A function that is called by its module's name too, as `metrics.read` is, says itself which of them it is.
    """
    imported = set(_imported_names(trees))
    places: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for place, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places["class", node.name].append((place, node.lineno))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (_module(place), node.name) in imported:
                places["function", node.name].append((place, node.lineno))
    return [
        Finding(*where[0], f"{kind} {name} is also in {', '.join(place for place, _ in where[1:])}")
        for (kind, name), where in sorted(places.items())
        if len(where) > 1
    ]


def _imported_names(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield a module and a name for each name that one of these files imports from another module."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from ((node.module, alias.name) for alias in node.names)


def _module(place: str) -> str:
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def list_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with the number of its first line; lines of comment below each other are one."""
    start, lines = 0, list[str]()
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield start, plain(" ".join(lines))
            lines = []
        start, last = start if lines else token.start[0], token.start[0]
        lines.append(token.string.lstrip("#!: ").strip())
    if lines:
        yield start, plain(" ".join(lines))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items, headings and cells of a page, each with the number of its first line."""
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
    """Return Markdown as it is read: a piece of code is one word, a link is its words."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return re.sub(r"\*{1,2}(\S(?:.*?\S)?)\*{1,2}", r"\1", text)


def _list_docstring_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of docstrings, each with its line; a command line is not one."""
    for _, docstring in _docstrings(tree):
        for line, paragraph in paragraphs(docstring.value):
            if not paragraph.startswith("python -m "):
                yield docstring.lineno + line - 1, paragraph


def _list_string_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the other strings of some words, each with its line; in an f-string each value is one word."""
    skipped = {id(docstring) for _, docstring in _docstrings(tree)}
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


def _docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield each docstring with what it describes: a module, a class, a function, or the assignment of a field."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for described, statement in zip([node, *node.body], node.body, strict=False):
            is_described = described is node or isinstance(described, ast.Assign | ast.AnnAssign)
            constant = statement.value if isinstance(statement, ast.Expr) else None
            if is_described and isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield described, constant


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def report(found: Iterable[Finding]) -> str:
    """Return one line a finding, then the number of findings of each place."""
    found = list(found)
    counts = Counter(finding.place.split("/")[0] for finding in found)
    summary = ", ".join(f"{place} {count}" for place, count in counts.most_common())
    return "\n".join([*map(str, found), f"{len(found)} findings{': ' + summary if summary else ''}"])


def main(paths: list[str]) -> int:
    found = check_tree(ROOT)
    if paths:
        found = [finding for finding in found if finding.place.startswith(tuple(paths))]
    print(report(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
