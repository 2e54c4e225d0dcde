"""Sites of mutations in a program: small changes of its syntax tree, as edits of its text.

Operators: `and`/`or`, comparisons and their boundaries, `not`, numbers and truth values, `+`/`-`,
a returned value that becomes None, a statement that is left out. Annotations, decorators, strings,
assertions and log lines stay: a change of those is no bug that a test of behaviour can see. So do
the time limits of a module, which are floats: a second more is no bug.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_SWAPPED = {"and": "or", "or": "and", "+": "-", "-": "+"}
_LOGS = ("log", "_log", "logger", "say")
_TEXT = (ast.JoinedStr, ast.Tuple, ast.List)

_Position = tuple[int, int]  # line from 1, column in characters from 0


class Site(Struct, frozen=True):
    """One mutant: `before` at this place of `file` becomes `after`.

    `source` is the line's text, by which a judgement survives edits elsewhere in the file;
    `statement` is the first line of the statement that it is in.
    """

    file: str
    line: int
    statement: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    source: str
    in_function: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key under which a verdict is stored, without line numbers."""
        return (self.file, self.source, self.before, self.after)

    def mutate(self, text: str) -> str:
        """The text of the file with the bug, with the same number of lines."""
        lines = "\n" * self.before.count("\n")
        return text[: self.start] + self.after + lines + text[self.end :]


def sites(path: Path, name: str) -> list[Site]:
    """All mutants of a file, in the order of their positions. `name`: the file name for reports."""
    text = path.read_text()
    finder = _Finder(name, text)
    finder.statements(ast.parse(text).body)
    # Some positions occur twice (a negated guard), and some mutants do not compile.
    unique = {(site.start, site.end, site.after): site for site in finder.sites}
    valid = [site for site in unique.values() if _compiles(site.mutate(text))]
    return sorted(valid, key=lambda site: (site.start, site.end, site.after))


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    def __init__(self, name: str, text: str) -> None:
        self.sites: list[Site] = []
        self._name = name
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._at = 0  # the first line of the present statement
        self._depth = 0  # of functions around it
        self._offsets = [0]
        for line in self._lines:
            self._offsets.append(self._offsets[-1] + len(line))
        read = io.StringIO(text).readline
        self._tokens = [
            token
            for token in tokenize.generate_tokens(read)
            if token.type in (tokenize.NAME, tokenize.OP)
        ]

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        self._at = node.lineno
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass():
                return
            case ast.If(test=test) if _is_static(test):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for default in [*node.args.defaults, *node.args.kw_defaults]:
                    self._expressions(default)
                self._depth += 1
                self.statements(node.body)
                self._depth -= 1
                return
            case ast.ClassDef():
                if not any(
                    isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
                ):
                    self.statements(node.body)
                return
            case ast.AnnAssign():
                self._expressions(node.value)
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Expr(value=ast.Call() as call) if _is_log(call):
                return
            case ast.Return(value=value) if value is not None and not _is_nothing(value):
                self._replace("return None", node, "return None")
        if _may_be_left_out(node):
            self._replace("delete", node, "pass")
        for child in ast.iter_child_nodes(node):
            self._at = node.lineno
            self._child(child)

    def _child(self, node: ast.AST) -> None:
        match node:
            case ast.stmt():
                self._statement(node)
            case ast.expr():
                self._expressions(node)
            case ast.ExceptHandler() | ast.match_case() | ast.withitem() | ast.comprehension():
                for child in ast.iter_child_nodes(node):
                    self._child(child)
            case ast.keyword(value=value):
                self._expressions(value)

    def _expressions(self, node: ast.expr | None) -> None:
        if node is None:
            return
        match node:
            case ast.BoolOp(values=values):
                for left, right in pairwise(values):
                    self._swap("and/or", left, right, ("and", "or"))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for op, before, after in zip(ops, [left, *comparators], comparators, strict=False):
                    self._compare(op, before, after)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._without_not(node, operand)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                if not (_is_text(left) or _is_text(right)):
                    self._swap("+/-", left, right, ("+", "-"))
            case ast.Constant(value=bool() as value):
                self._replace("constant", node, str(not value))
            case ast.Constant(value=float() as value) if value and not self._depth:
                return  # a time limit
            case ast.Constant(value=int() | float() as value):
                self._replace("constant", node, repr(value + 1))
            case ast.Lambda(body=body):
                self._expressions(body)
                return
        for child in ast.iter_child_nodes(node):
            self._child(child)

    def _compare(self, op: ast.cmpop, before: ast.expr, after: ast.expr) -> None:
        tokens = [t for t in self._between(before, after) if t.string not in ("(", ")")]
        if tokens:
            for swapped in COMPARISONS[type(op)]:
                self._add("comparison", tokens[0].start, tokens[-1].end, swapped)

    def _swap(self, kind: str, left: ast.expr, right: ast.expr, operators: tuple[str, ...]) -> None:
        for token in self._between(left, right):
            if token.string in operators:
                self._add(kind, token.start, token.end, _SWAPPED[token.string])
                return

    def _without_not(self, node: ast.expr, operand: ast.expr) -> None:
        start, end = self._start(node), self._start(operand)
        first = next(t for t in self._tokens if start <= t.start < end and t.string == "not")
        line, column = first.end
        self._add("not", first.start, (line, column + 1), "")

    def _between(self, left: ast.expr, right: ast.expr) -> Iterator[tokenize.TokenInfo]:
        end, start = self._end(left), self._start(right)
        return (t for t in self._tokens if end <= t.start and t.end <= start)

    def _replace(self, kind: str, node: ast.stmt | ast.expr, after: str) -> None:
        self._add(kind, self._start(node), self._end(node), after)

    def _add(self, kind: str, start: _Position, end: _Position, after: str) -> None:
        first = self._offsets[start[0] - 1] + start[1]
        last = self._offsets[end[0] - 1] + end[1]
        source = self._lines[start[0] - 1].strip()
        before = self._text[first:last]
        place = (self._name, start[0], self._at, kind, first, last)
        self.sites.append(Site(*place, before, after, source, self._depth > 0))

    def _start(self, node: ast.stmt | ast.expr) -> _Position:
        return (node.lineno, self._column(node.lineno, node.col_offset))

    def _end(self, node: ast.stmt | ast.expr) -> _Position:
        line, column = node.end_lineno, node.end_col_offset
        assert line is not None
        assert column is not None
        return (line, self._column(line, column))

    def _column(self, line: int, count: int) -> int:
        """Convert a column: the tree counts bytes, this module counts characters."""
        return len(self._lines[line - 1].encode()[:count].decode())


def _may_be_left_out(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            return not _never(node)
        case ast.Continue() | ast.Break() | ast.Delete():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.If(orelse=[]):
            return not any(_never(statement) for statement in node.body)
    return False


def _never(node: ast.stmt) -> bool:
    """Whether the statement is marked as unreachable."""
    match node:
        case ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id="assert_never"))):
            return True
    return False


def _is_log(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)):
            return name in _LOGS
    return False


def _is_static(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__")):
            return True
    return False


def _is_nothing(value: ast.expr) -> bool:
    """Whether it is None, or False, which callers do not distinguish."""
    return isinstance(value, ast.Constant) and (value.value is None or value.value is False)


def _is_text(value: ast.expr) -> bool:
    constant = isinstance(value, ast.Constant) and isinstance(value.value, str | bytes)
    return constant or isinstance(value, _TEXT)
