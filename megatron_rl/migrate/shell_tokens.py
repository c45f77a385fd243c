"""The division of a shell script's text into words, with their quotes, and operators."""

import re
from collections.abc import Iterator

OPERATORS = ("&&", "||", ";;", "|&", "&>>", "&>", ">>", "<<<", ">&", "<&", ";", "|", "&", "(", ")", "<", ">", "\n")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[\w+\])?(\+?)=(.*)", re.DOTALL)
SPACES = " \t\r\n"


def split_tokens(text: str) -> Iterator[str]:
    """Yield the words and operators of a script, without comments and here-documents."""
    text = text.replace("\\\r\n", "\\\n")
    at, here = 0, ""
    while at < len(text):
        char = text[at]
        if char in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif char == "#":
            while at < len(text) and text[at] != "\n":
                at += 1
        elif text.startswith("((", at):
            end = find_bracket(text, at)
            yield text[at : end + 1]
            at = end + 1
        elif text.startswith("<<", at) and not text.startswith("<<<", at):
            match = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(text, at)
            here = match.group(1) if match else ""
            at = match.end() if match else at + 2
        else:
            operator = next((op for op in OPERATORS if text.startswith(op, at)), None)
            if operator is not None:
                yield operator
                at += len(operator)
                if operator == "\n" and here:
                    last = re.compile(rf"^\t*{here}$", re.MULTILINE).search(text, at)
                    at, here = (last.end() if last else len(text)), ""
            else:
                end = _find_word_end(text, at)
                yield text[at:end]
                at = end


def _find_word_end(text: str, at: int) -> int:
    start = at
    while at < len(text):
        char = text[at]
        if char == "'":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end + 1
        elif char == '"':
            at = find_quote(text, at) + 1
        elif char == "\\":
            if text.startswith("\\\n", at):
                return at
            at += 2
        elif char == "`":
            end = text.find("`", at + 1)
            at = len(text) if end < 0 else end + 1
        elif char == "$" and text[at + 1 : at + 2] in ("{", "("):
            at = find_bracket(text, at + 1) + 1
        elif char == "(" and ASSIGNMENT.fullmatch(text[start:at]) and text[at - 1] == "=":
            return find_bracket(text, at) + 1
        elif char in " \t\r\n;|&()<>":
            return at
        else:
            at += 1
    return at


def find_quote(text: str, at: int) -> int:
    """Find the end of the double quotes that begin here."""
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        elif text[at] == "$" and text[at + 1 : at + 2] in ("{", "("):
            at = find_bracket(text, at + 1) + 1
        else:
            at += 1
    return at


def find_bracket(text: str, at: int) -> int:
    """Find the end of the bracket that opens here, ignoring quoted text inside."""
    closing = {"(": ")", "{": "}"}
    stack = [closing[text[at]]]
    at += 1
    while at < len(text):
        char = text[at]
        if char == stack[-1]:
            stack.pop()
            if not stack:
                return at
        elif char in closing:
            stack.append(closing[char])
        elif char == "'":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end
        elif char == '"':
            at = find_quote(text, at)
        elif char == "\\":
            at += 1
        elif char == "#" and text[at - 1] in SPACES:
            while at + 1 < len(text) and text[at + 1] != "\n":
                at += 1
        at += 1
    return len(text) - 1
