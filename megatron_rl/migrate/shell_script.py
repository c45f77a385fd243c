"""The reader of a shell script's commands, which runs none of them.

It follows assignments, arrays, conditions, arithmetic and sourced files, as launch scripts use them. A substitution of
a command's output stays as it is written, and so does a variable that is never set.
"""

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_rl.migrate.shell_tokens import ASSIGNMENT, OPERATORS, SPACES, find_bracket, find_quote, split_tokens

# A function that reads a file that the script sources; it returns None if the file does not exist.
ReadFile = Callable[[str], str | None]

_REDIRECTIONS = ("&>>", "&>", ">>", "<<<", ">&", "<&", "<", ">")
_ENDS = (";", "\n", "&", "&&", "||", "|", "|&", ";;")
_NAME = re.compile(r"\w+|[@*#?!$]")
_BRACED = re.compile(r"(\w+|[@*])(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_ARITHMETIC = re.compile(r"[\d\s()+*/%<>=!&|?:-]*")
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
# The comparisons of `test`.
_SIGNS: Mapping[str, type[ast.cmpop]] = {
    "-eq": ast.Eq, "-ne": ast.NotEq, "-gt": ast.Gt, "-ge": ast.GtE, "-lt": ast.Lt, "-le": ast.LtE,
}  # fmt: skip
# A loop with more rounds waits for a condition that only running the script would change.
_MOST_ROUNDS = 1000
_DEEPEST = 5


@dataclasses.dataclass
class ShellScript:
    """The variables and commands of a script."""

    variables: dict[str, list[str]]
    """The variables that it sets, each with its words; a plain variable has one word."""
    commands: list[list[str]] = dataclasses.field(default_factory=list)
    """The commands it would run, in order."""
    settable: set[str] = dataclasses.field(default_factory=set)
    """The names that it sets anywhere, whether or not that line is reached."""
    missing: list[str] = dataclasses.field(default_factory=list)
    """The files that it sources and that cannot be read."""


def read_shell_script(
    text: str,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    read_file: ReadFile = lambda _: None,
) -> ShellScript:
    """Read the variables and commands of a script that starts with these variables and arguments."""
    start = {name: [value] for name, value in (variables or {}).items()}
    start |= {str(at): [word] for at, word in enumerate(arguments, 1)}
    reader = _Reader(ShellScript({**start, "@": list(arguments)}), read_file)
    reader.read(text)
    return reader.script


class _Reader:
    def __init__(self, script: ShellScript, read_file: ReadFile, depth: int = 0):
        self.script = script
        self._read_file = read_file
        self._depth = depth
        self._tokens: list[str] = []
        self._at = 0
        # The exit status of the last condition. That of other commands is unknown, and counts as success.
        self._status = True

    def read(self, text: str) -> None:
        # A variable that the script sets in some branch is empty if that branch is not taken.
        self.script.settable |= set(re.findall(r"(?:^|[\s;&])(\w+)\+?=", text))
        self._tokens = list(split_tokens(text))
        while self._at < len(self._tokens):
            self._read_list(True, ())
            self._at += 1

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _read_list(self, is_run: bool, until: Sequence[str]) -> None:
        """Read commands up to one of these words, which is not consumed."""
        runs = is_run
        while self._at < len(self._tokens) and self._peek() not in until:
            word = self._peek()
            if word in _ENDS or word == ")":
                runs = is_run and (self._status if word == "&&" else not self._status if word == "||" else True)
                self._at += 1
            elif word == "if":
                self._read_if(runs)
            elif word in ("for", "while", "until"):
                self._read_loop(runs)
            elif word == "case":
                self._read_case(runs)
            elif word in ("{", "("):
                self._at += 1
                self._read_list(runs, ("}" if word == "{" else ")",))
                self._at += 1
            else:
                self._read_command(runs)

    def _skip_to(self, word: str) -> None:
        while self._at < len(self._tokens) and self._peek() != word:
            self._at += 1

    def _read_if(self, is_run: bool) -> None:
        is_done = False
        while self._peek() in ("if", "elif"):
            self._at += 1
            runs = is_run and not is_done
            self._read_list(runs, ("then",))
            holds = runs and self._status
            self._at += 1
            self._read_list(holds, ("elif", "else", "fi"))
            is_done = is_done or holds
        if self._peek() == "else":
            self._at += 1
            self._read_list(is_run and not is_done, ("fi",))
        self._at += 1
        self._status = True

    def _read_loop(self, is_run: bool) -> None:
        """Run the body of a `for`; skip that of a `while`, because its condition is unknown."""
        start = self._at
        self._skip_to("do")
        head, self._at = self._tokens[start + 1 : self._at], self._at + 1
        body = self._at
        for _ in self._list_rounds(
            [word for word in head if word not in _ENDS], is_run and self._tokens[start] == "for"
        ):
            self._at = body
            self._read_list(True, ("done",))
        self._at = body
        self._read_list(False, ("done",))
        self._at += 1

    def _list_rounds(self, head: list[str], is_run: bool) -> Iterator[None]:
        if not is_run or not head:
            return
        if head[0].startswith("(("):
            first, condition, after = (part.strip() for part in head[0][2:-2].split(";"))
            self._set_number(first)
            for _ in range(_MOST_ROUNDS):
                if self._compute(condition) != "1":
                    return
                yield
                self._set_number(after)
        elif head[1:2] == ["in"]:
            for word in [word for raw in head[2:] for word in self._expand(raw)][:_MOST_ROUNDS]:
                self.script.variables[head[0]] = [word]
                yield

    def _set_number(self, text: str) -> None:
        """Set a number by `i=0`, `i++` or `i+=2`."""
        match = re.fullmatch(r"(\w+)\s*(\+\+|--|[-+]?=)\s*(.*)", text)
        if match is None:
            return
        name, operator, value = match.groups()
        operation = {"=": value, "++": f"{name}+1", "--": f"{name}-1"}.get(operator, f"{name}{operator[0]}({value})")
        self.script.variables[name] = [self._compute(operation)]

    def _read_case(self, is_run: bool) -> None:
        self._at += 1
        word = "".join(self._expand(self._peek()))
        self._skip_to("in")
        self._at += 1
        is_done = False
        while self._at < len(self._tokens) and self._peek() != "esac":
            patterns = []
            while self._peek() not in (")", "esac", ""):
                patterns.append(self._peek())
                self._at += 1
            if self._peek() != ")":
                break
            self._at += 1
            fits = any("".join(self._expand(pattern)) in (word, "*") for pattern in patterns)
            self._read_list(is_run and fits and not is_done, (";;", "esac"))
            is_done = is_done or fits
            if self._peek() == ";;":
                self._at += 1
            while self._peek() == "\n":
                self._at += 1
        self._at += 1

    def _read_command(self, is_run: bool) -> None:
        raw: list[str] = []
        while self._at < len(self._tokens) and self._peek() not in (*_ENDS, ")"):
            word = self._peek()
            self._at += 1
            if word in _REDIRECTIONS:
                if raw and raw[-1].isdigit():
                    raw.pop()
                self._at += 1
            elif word == "(":
                # The head of a function; calls of functions are not followed, so the body is skipped.
                self._skip_to("{")
                self._at += 1
                self._read_list(False, ("}",))
                self._at += 1
                return
            else:
                raw.append(word)
                if raw[0] == "[[" and word == "]]":
                    break
        if is_run and raw:
            self._run(raw)

    def _run(self, raw: list[str]) -> None:
        if raw[0] in ("export", "local", "declare", "readonly", "typeset"):
            raw = [word for word in raw[1:] if not word.startswith("-")]
            raw = [word for word in raw if ASSIGNMENT.match(word)]
        assignments = []
        while raw and ASSIGNMENT.match(raw[0]):
            assignments.append(raw.pop(0))
        self._status = True
        if not raw:
            for word in assignments:
                self._assign(word)
            return
        if raw[0] == "!":
            self._run(raw[1:])
            self._status = not self._status
            return
        if raw[0] in ("[", "[[", "test"):
            self._status = _test(["".join(self._expand_parts(word)) for word in raw[1:] if word not in ("]", "]]")])
            return
        if raw[0].startswith("(("):
            self._set_number(raw[0][2:-2].strip())
            self._status = self._compute(raw[0][2:-2]) not in ("0", "")
            return
        words = [part for word in raw for part in self._expand(word)]
        if words in (["true"], ["false"]):
            self._status = words == ["true"]
        elif words and words[0] in ("source", "."):
            path = words[1] if len(words) > 1 else ""
            sourced = self._read_file(path)
            if sourced is None:
                self.script.missing.append(path)
            else:
                self._read_inner(sourced)
        elif words and words[0] == "eval":
            self._read_inner(" ".join(words[1:]))
        elif words[:2] == ["printf", "-v"] and len(words) == 5:
            self.script.variables[words[2]] = [words[3].replace("%s", words[4])]
        elif words:
            self.script.commands.append(words)

    def _read_inner(self, text: str) -> None:
        if self._depth < _DEEPEST:
            _Reader(self.script, self._read_file, self._depth + 1).read(text)

    def _assign(self, word: str) -> None:
        match = ASSIGNMENT.match(word)
        assert match is not None
        name, index, more, value = match.groups()
        if index:
            return
        if value.startswith("(") and value.endswith(")"):
            words = [part for raw in split_tokens(value[1:-1]) if raw not in OPERATORS for part in self._expand(raw)]
            self.script.variables[name] = [*self.script.variables.get(name, ()), *words] if more else words
            return
        text = "".join(self._expand_parts(value))
        earlier = self.script.variables.get(name, [""])
        self.script.variables[name] = [(" ".join(earlier) if more else "") + text]

    def _expand(self, raw: str) -> list[str]:
        """Expand a word of the script into words, split where an unquoted expansion has spaces."""
        words: list[str] = []
        is_open = False
        for text, is_quoted, is_whole in self._list_parts(raw):
            pieces = [text] if is_quoted else re.split(rf"[{SPACES}]+", text)
            for at, piece in enumerate(pieces):
                if at or (is_whole and words):
                    is_open = False
                if not piece and not is_quoted:
                    continue
                if is_open:
                    words[-1] += piece
                else:
                    words.append(piece)
                is_open = True
            if not is_quoted and text and text[-1] in SPACES:
                is_open = False
        return words

    def _expand_parts(self, raw: str) -> Iterator[str]:
        at_first = True
        for text, _, is_whole in self._list_parts(raw):
            yield (" " if is_whole and not at_first else "") + text
            at_first = False

    def _list_parts(self, raw: str, is_quoted: bool = False) -> Iterator[tuple[str, bool, bool]]:
        """Yield the parts of a word: its text, whether quotes keep its spaces, and whether it is a word of an array.

        If it is quoted, it is the text between double quotes.
        """
        if is_quoted and not raw:
            yield "", True, False
        at = 0
        while at < len(raw):
            char = raw[at]
            if char in "$`":
                words, at = self._expand_variable(raw, at)
                for index, word in enumerate(words):
                    # A command substitution, which is not run, is one word.
                    yield word, is_quoted or word.startswith(("$(", "`")), index > 0
                continue
            if char == "'" and not is_quoted:
                end = raw.find("'", at + 1)
                end = len(raw) if end < 0 else end
                yield raw[at + 1 : end], True, False
                end += 1
            elif char == '"' and not is_quoted:
                end = find_quote(raw, at)
                yield from self._list_parts(raw[at + 1 : end], is_quoted=True)
                end += 1
            elif char == "\\" and (not is_quoted or raw[at + 1 : at + 2] in tuple('"\\$`\n')):
                end = at + 2
                yield raw[at + 1 : end].replace("\n", "" if is_quoted else "\n"), True, False
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in ("\\$`" if is_quoted else "'\"\\$`"):
                    end += 1
                yield raw[at:end], True, False
            at = end

    def _expand_variable(self, raw: str, at: int) -> tuple[list[str], int]:
        """Return the words of an expansion, and the index of its end."""
        if raw[at] == "`":
            end = raw.find("`", at + 1)
            end = len(raw) - 1 if end < 0 else end
            return [raw[at : end + 1]], end + 1
        if raw.startswith("$((", at):
            end = find_bracket(raw, at + 1)
            return [self._compute(raw[at + 3 : end - 1])], end + 1
        if raw.startswith("$(", at):
            end = find_bracket(raw, at + 1)
            return [self._substitute(raw[at : end + 1])], end + 1
        if raw.startswith("${", at):
            end = find_bracket(raw, at + 1)
            return self._expand_braced(raw[at + 2 : end]), end + 1
        match = _NAME.match(raw, at + 1)
        if match is None:
            return ["$"], at + 1
        name, end = match.group(), match.end()
        if name.isdigit():
            name, end = name[0], at + 2
        return self.script.variables.get(name, [] if name in self.script.settable else [f"${name}"]), end

    def _substitute(self, raw: str) -> str:
        """Return the output of `dirname`, `basename`, `cd ... && pwd` and `echo`; keep other commands as written."""
        inner = _Reader(ShellScript(dict(self.script.variables)), lambda _: None, self._depth + 1)
        if self._depth < _DEEPEST:
            inner.read(raw[2:-1])
        commands = [[word for word in words if word not in ("--", "-P", "-e")] for words in inner.script.commands]
        if [words[0] for words in commands] == ["cd", "pwd"]:
            return commands[0][1] if len(commands[0]) > 1 else raw
        if len(commands) != 1:
            return raw
        name, *words = commands[0]
        if name in ("dirname", "basename") and len(words) == 1:
            head, _, tail = words[0].rpartition("/")
            return (head or ".") if name == "dirname" else tail
        return " ".join(words) if name == "echo" else raw

    def _expand_braced(self, inside: str) -> list[str]:
        match = _BRACED.fullmatch(inside)
        if match is None:
            return ["${" + inside + "}"]
        name, index, operator, other = match.groups()
        words = self.script.variables.get(name)
        if operator is None:
            if words is None:
                return [] if index or name in ("@", *self.script.settable) else ["${" + inside + "}"]
            if index == "[*]":
                return [self.script.variables.get("IFS", [" "])[0][:1].join(words)]
            return words if index == "[@]" or name == "@" else words[:1]
        is_set = words is not None and (":" not in operator or any(words))
        if operator.endswith("+"):
            return ["".join(self._expand_parts(other))] if is_set else [""]
        if is_set:
            assert words is not None
            return words
        value = "".join(self._expand_parts(other))
        if operator.endswith("="):
            self.script.variables[name] = [value]
        return [value]

    def _compute(self, expression: str) -> str:
        """Compute an arithmetic expression of whole numbers; keep any other text as it is written."""
        plain = "".join(self._expand_parts(re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", expression)))
        if not _ARITHMETIC.fullmatch(plain) or "**" in plain or not plain.strip():
            return f"$(({expression}))"
        match = re.fullmatch(r"(.*?)\?(.*):(.*)", plain, re.DOTALL)
        try:
            if match is not None:
                condition, first, second = match.groups()
                return str(_calculate(first if _calculate(condition) else second))
            return str(_calculate(plain))
        except (SyntaxError, ValueError, ZeroDivisionError, TypeError):
            return f"$(({expression}))"


def _calculate(text: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            return int(_COMPARISONS[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        raise ValueError(text)

    return value(ast.parse(text.strip(), mode="eval").body)


def _test(words: list[str]) -> bool:
    for joint, together in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if joint in words:
            at = words.index(joint)
            return together(map(_test, (words[:at], words[at + 1 :])))
    if words and words[0] == "!":
        return not _test(words[1:])
    if len(words) == 2 and words[0].startswith("-"):
        is_set = bool(words[1]) and not words[1].startswith("$")
        return {"-z": not is_set, "-n": is_set, "-f": True, "-d": True, "-e": True}.get(words[0], False)
    if len(words) == 3:
        return _compare(*words)
    return len(words) == 1 and bool(words[0])


def _compare(left: str, sign: str, right: str) -> bool:
    if sign in ("=", "=="):
        return left == right or (right.endswith("*") and left.startswith(right[:-1]))
    if sign == "!=":
        return left != right
    try:
        if sign == "=~":
            return re.search(right, left) is not None
        return sign in _SIGNS and _COMPARISONS[_SIGNS[sign]](int(left), int(right))
    except (re.error, ValueError):
        return False
