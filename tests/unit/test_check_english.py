"""The report on hard prose finds what it says it finds, and nothing in prose that is plain."""

import ast

import pytest

from tools.check_english import (
    check_markdown,
    check_strings,
    check_text,
    check_tree,
    double_names,
    paragraphs,
    plain,
    report,
)

LONG = "This sentence " + "goes on, " * 34 + "and ends."


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0 is no duration.", 'says "is no"'),
        ("They are no files.", 'says "are no"'),
        ("Whom it may concern.", 'says "Whom"'),
        ("That which was sent.", 'says "That which"'),
        (LONG, "a sentence of 72 words: This sentence goes on, goes on, goes on, ..."),
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
        LONG.replace("on, ", "on. It "),
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


def test_errors_and_helps_are_read_and_docstrings_of_code_are_not():
    code = '''
"""A module is no place to look."""
class Config:
    """A class is no place to look."""
    size: int = 1
    """Help that is no help."""

def check(value):
    """A function is no place to look."""
    raise ValueError(f"{value} is no number: write one")
    yield "a problem whom nobody has"
'''
    found = check_strings(ast.parse(code), "x.py")
    assert [(finding.line, finding.what) for finding in found] == [
        (6, 'says "is no"'), (10, 'says "is no"'), (11, 'says "whom"'),
    ]  # fmt: skip


def test_a_name_that_stands_for_two_things_is_reported_once():
    text = "class Plan: ...\nclass _Own: ...\ndef read(): ...\ndef main(): ...\ndef _own(): ..."
    trees = {name: ast.parse(text) for name in ("x/a.py", "x/b.py", "y/c.py")}
    assert [str(finding) for finding in double_names(trees)] == [
        "x/a.py:1: class Plan is also in x/b.py, y/c.py",
        "x/a.py:3: function read is also in x/b.py, y/c.py",
    ]


def test_functions_that_modules_of_a_folder_share_are_their_interface():
    assert double_names({name: ast.parse("def make(): ...") for name in ("x/a.py", "x/b.py")}) == []


def test_a_tree_is_reported_place_by_place(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "flags.md").write_text("It is no page that somebody wrote.\n")
    (tmp_path / "README.md").write_text("It is no page.\n")
    (tmp_path / "megatron_rl").mkdir()
    (tmp_path / "megatron_rl" / "x.py").write_text("MESSAGE = 'this is no error at all'\n")
    lines = report(check_tree(tmp_path)).splitlines()
    assert lines == [
        'README.md:1: says "is no"',
        'megatron_rl/x.py:1: says "is no"',
        "2 findings: README.md 1, megatron_rl 1",
    ]
