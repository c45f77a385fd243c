"""The checker of prose finds each kind of hard sentence that it knows, and nothing in plain prose."""

import ast

import pytest

from tools.check_english import (
    GLOSSARY,
    check_markdown,
    check_source,
    check_text,
    check_tree,
    find_double_names,
    list_comments,
    paragraphs,
    plain,
    report,
)

LONG = "This sentence " + "is long, " * 34 + "and ends."


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((f"A word {phrase} another.", f'says "{phrase}" ({plain})') for phrase, plain in GLOSSARY.items()),
        ("Whom it may concern.", 'says "Whom" (two sentences)'),
        (LONG, "a sentence of 72 words: This sentence is long, is long, is long, ..."),
    ],
)
def test_a_hard_sentence_is_found_with_its_line(text, what):
    assert [str(finding) for finding in check_text(f"Plain. {text} Plain.", "page.md", 7)] == [f"page.md:7: {what}"]


@pytest.mark.parametrize(
    "text",
    [
        "It must be above 0.",
        "There is no longer a file.",
        "The basis not known is nothing.",
        LONG.replace("long, ", "long. It "),
        "--flag " * 50,
    ],
)
def test_a_plain_sentence_is_not_reported(text):
    assert check_text(text, "page.md", 1) == []


def test_a_page_is_read_cell_by_cell_and_without_its_code():
    page = "# Title\n\nOne\ntwo.\n\n```bash\nThis is no word\n```\n\n- item\n- `is no` item\n\n| a | b |\n| c | d |\n"
    assert list(paragraphs(page)) == [
        (1, "Title"), (3, "One two."), (10, "item"), (11, "CODE item"), (13, "a"), (13, "b"), (14, "c"), (14, "d"),
    ]  # fmt: skip
    assert check_markdown(page, "page.md") == []
    assert [finding.line for finding in check_markdown(f"{page}\n## It is no page\n", "page.md")] == [16]


def test_markdown_is_read_as_its_reader_sees_it():
    assert plain("**Bold** [words of a link](page.md#x) and `code of words` ![alt](a.svg)") == (
        "Bold words of a link and CODE "
    )


def test_every_text_of_a_python_file_is_read():
    code = '''
"""A module is no place to hide."""
class Config:
    """A class.

    Its second paragraph is no place to hide.
    """
    size: int = 1
    """Help that is no help."""

def check(value):
    """Return a value that is no place to hide."""
    # A comment whose
    # second line is no place to hide.
    raise ValueError(f"{value} is no number: write one")
    yield "a problem whom a reader has"  # is no place to hide
'''
    found = check_source(code, "x.py")
    assert [(finding.line, finding.message.split(" (")[0]) for finding in found] == [
        (2, 'says "is no"'), (6, 'says "is no"'), (9, 'says "is no"'), (12, 'says "is no"'), (13, 'says "is no"'),
        (15, 'says "is no"'), (16, 'says "whom"'), (16, 'says "is no"'),
    ]  # fmt: skip


def test_lines_of_comment_below_each_other_are_one_text():
    code = "x = 1  # one\n# two\n# three\ny = 2\n# four `five`\n"
    assert list(list_comments(code)) == [(1, "one two three"), (5, "four CODE")]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('def f():\n    """What takes a value."""', 2),
        ('def f():\n    """The sum of two values."""', 2),
        ('class A:\n    """What takes a value."""', 2),
        ('class A:\n    size: int\n    """How large it is."""', 3),
        ('class A:\n    @property\n    def size(self):\n        """What it has."""', 4),
        ('"""What takes a value."""', 1),
    ],
)
def test_a_docstring_that_begins_with_the_wrong_part_of_speech_is_found(code, line):
    assert [(finding.line, "begins with" in finding.message) for finding in check_source(code, "x.py")] == [
        (line, True)
    ]


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the sum of two values."""',
        'class A:\n    """The sum of two values."""\n    size: int\n    """Its number of bytes."""',
        'class A:\n    @functools.cached_property\n    def size(self):\n        """The number of bytes."""',
        "def f():\n    yield\n    ...",
    ],
)
def test_a_docstring_that_begins_with_a_verb_or_a_noun_is_not_reported(code):
    assert check_source(code, "x.py") == []


def test_a_class_name_that_stands_for_two_things_is_reported_once():
    trees = {name: ast.parse("class Plan: ...\nclass _Plan: ...") for name in ("x/a.py", "x/b.py", "y/c.py")}
    assert [str(finding) for finding in find_double_names(trees)] == [
        "x/a.py:1: class Plan is also in x/b.py, y/c.py",
        "x/a.py:2: class _Plan is also in x/b.py, y/c.py",
    ]


def test_functions_of_one_name_are_reported_where_both_are_imported_without_their_module():
    functions = {name: ast.parse("def read(): ...\ndef main(): ...") for name in ("x/a.py", "x/b.py", "y/__init__.py")}
    by_module = ast.parse("from x import a, b\nfrom y import read\na.read(), b.read()")
    assert find_double_names({**functions, "z.py": by_module}) == []
    by_name = ast.parse("from x.a import read\nfrom y import read as read_y")
    assert [str(finding) for finding in find_double_names({**functions, "z.py": by_name})] == [
        "x/a.py:1: function read is also in y/__init__.py",
    ]


def test_a_tree_is_reported_place_by_place(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "flags.md").write_text("It is no page that a person wrote.\n")
    (tmp_path / "README.md").write_text("It is no page.\n")
    (tmp_path / "megatron_rl").mkdir()
    (tmp_path / "megatron_rl" / "x.py").write_text("MESSAGE = 'this is no error at all'\n")
    lines = report(check_tree(tmp_path)).splitlines()
    assert lines == [
        'README.md:1: says "is no" (is not, or must be)',
        'megatron_rl/x.py:1: says "is no" (is not, or must be)',
        "2 findings: README.md 1, megatron_rl 1",
    ]
