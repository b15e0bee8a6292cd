"""First-order mutants of a Python file: the file with one small change each, as a careless edit would make it."""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

Change = tuple[str, ast.AST | list[ast.stmt]]
"""An operator's name, and what takes the node's place."""


@dataclass(frozen=True)
class Mutant:
    """One change of a file. operator: what was done; line: where, in the original; before, after: the changed lines as
    `ast` writes them. nth: how many changes of the same text come before it in its function. key names the mutant by place
    and change, whatever its line number."""

    operator: str
    line: int
    scope: str
    before: str
    after: str
    source: str = field(repr=False, compare=False)
    nth: int = 0

    @property
    def key(self) -> str:
        """Stays the same while the function's text around the change does."""
        text = "\n".join((self.operator, self.scope, self.before, self.after, *([str(self.nth)] if self.nth else [])))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def diff(self) -> str:
        """What was changed, as a unified diff without its head."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def mutants(source: str) -> list[Mutant]:
    """All first-order mutants of a file, in the order of its lines. Two changes that give the same text count once.
    Raises SyntaxError."""
    tree = ast.parse(source)
    original = ast.unparse(tree)
    found: dict[str, Mutant] = {}
    for place in list(_places(tree)):
        for operator, replacement in _changes(place.node):
            mutant = _mutant(tree, original, place, operator, replacement)
            if mutant is not None:
                found.setdefault(mutant.source, mutant)
    return _numbered(sorted(found.values(), key=lambda mutant: mutant.line))


def _numbered(found: list[Mutant]) -> list[Mutant]:
    """Mutants that read alike, told apart by their order."""
    seen: Counter[str] = Counter()
    numbered = []
    for mutant in found:
        numbered.append(replace(mutant, nth=seen[mutant.key]))
        seen[mutant.key] += 1
    return numbered


# --------------------------------------------------------------------------------------------------------------- places


@dataclass(frozen=True)
class _Place:
    """A node, how to reach it from the module, and the function or class around it."""

    node: ast.AST
    path: tuple[tuple[str, int | None], ...]
    scope: str


def _places(tree: ast.Module) -> Iterator[_Place]:
    yield from _below(tree, (), "")


def _below(node: ast.AST, path: tuple[tuple[str, int | None], ...], scope: str) -> Iterator[_Place]:
    for name, value in ast.iter_fields(node):
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _says_nothing(node, name, child):
                continue
            inner = f"{scope}.{child.name}".lstrip(".") if isinstance(child, _SCOPES) else scope
            place = _Place(child, (*path, (name, index)), scope)
            if scope or not isinstance(child, ast.stmt):
                yield place
            yield from _below(child, place.path, inner)


_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LOGGERS = ("logger", "logging", "log")


def _says_nothing(parent: ast.AST, name: str, child: ast.AST) -> bool:
    """Annotations, decorators, imports, docstrings and log lines: no test of behaviour can see them change."""
    if name in ("annotation", "returns", "decorator_list", "bases"):
        return True
    if isinstance(child, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
        return True
    if isinstance(child, ast.Expr):
        value = child.value
        if isinstance(value, ast.Constant):
            return True
        return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[0] in _LOGGERS
    return isinstance(child, ast.JoinedStr) or (isinstance(parent, (ast.Raise, ast.Assert)) and name == "msg")


# -------------------------------------------------------------------------------------------------------------- changes


def _changes(node: ast.AST) -> Iterator[Change]:
    for kind, change in _OPERATORS:
        if isinstance(node, kind):
            yield from change(node)


_COMPARED_AS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_COMPUTED_AS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
}


def _comparison(node: ast.Compare) -> Iterator[Change]:
    for index, op in enumerate(node.ops):
        for other in _COMPARED_AS.get(type(op), ()):
            changed = copy.deepcopy(node)
            changed.ops[index] = other()
            yield "comparison", changed


def _arithmetic(node: ast.BinOp | ast.AugAssign) -> Iterator[Change]:
    for other in _COMPUTED_AS.get(type(node.op), ()):
        changed = copy.deepcopy(node)
        changed.op = other()
        yield "arithmetic", changed


def _constant(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "boundary", ast.Constant(value + 1)
        yield "boundary", ast.Constant(value - 1)
    elif isinstance(value, float):
        yield "constant", ast.Constant(value + 1.0)
    elif isinstance(value, str) and value:
        yield "constant", ast.Constant(value + "_")
    elif value is None:
        yield "constant", ast.Constant(0)


def _condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[Change]:
    changed = copy.deepcopy(node)
    changed.test = ast.UnaryOp(ast.Not(), changed.test)
    yield "condition", changed
    for value in (True, False):
        changed = copy.deepcopy(node)
        changed.test = ast.Constant(value)
        if not (value and isinstance(node, ast.While)):
            yield "condition", changed


def _connective(node: ast.BoolOp) -> Iterator[Change]:
    changed = copy.deepcopy(node)
    changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "condition", changed
    for index in range(len(node.values)):
        rest = [value for i, value in enumerate(node.values) if i != index]
        yield "condition", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, copy.deepcopy(rest))


def _deletion(node: ast.stmt) -> Iterator[Change]:
    yield "statement deletion", ast.Pass()


def _slice(node: ast.Slice) -> Iterator[Change]:
    for name in ("lower", "upper", "step"):
        if getattr(node, name) is not None:
            changed = copy.deepcopy(node)
            setattr(changed, name, None)
            yield "slice", changed


def _loop(node: ast.For) -> Iterator[Change]:
    changed = copy.deepcopy(node)
    changed.iter = ast.Tuple([], ast.Load())
    yield "loop", changed
    changed = copy.deepcopy(node)
    changed.body = [*changed.body, ast.Break()]
    yield "loop", changed


def _return(node: ast.Return) -> Iterator[Change]:
    if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
        return
    yield "return", ast.Return(ast.Constant(None))
    if isinstance(node.value, ast.Tuple):
        yield "return", ast.Return(ast.Tuple(list(reversed(copy.deepcopy(node.value.elts))), ast.Load()))


def _swapped_arguments(node: ast.Call) -> Iterator[Change]:
    for index in range(len(node.args) - 1):
        changed = copy.deepcopy(node)
        changed.args[index : index + 2] = reversed(changed.args[index : index + 2])
        yield "swapped argument", changed


_OPERATORS: tuple[tuple[Any, Callable[[Any], Iterator[Change]]], ...] = (
    (ast.Compare, _comparison),
    ((ast.BinOp, ast.AugAssign), _arithmetic),
    (ast.Constant, _constant),
    ((ast.If, ast.While, ast.IfExp), _condition),
    (ast.BoolOp, _connective),
    ((ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Continue, ast.Break, ast.Raise, ast.Delete), _deletion),
    (ast.Slice, _slice),
    (ast.For, _loop),
    (ast.Return, _return),
    (ast.Call, _swapped_arguments),
)


# -------------------------------------------------------------------------------------------------------------- results


def _mutant(
    tree: ast.Module, original: str, place: _Place, operator: str, replacement: ast.AST | list[ast.stmt]
) -> Mutant | None:
    """The mutant, or None where the text stays as it was. The tree is changed and changed back."""
    parent: Any = tree
    for name, index in place.path[:-1]:
        parent = getattr(parent, name) if index is None else getattr(parent, name)[index]
    name, index = place.path[-1]
    _put(parent, name, index, replacement)
    source = ast.unparse(ast.fix_missing_locations(tree))
    _put(parent, name, index, place.node)
    if source == original:
        return None
    before, after = _changed_lines(original, source)
    return Mutant(operator, getattr(place.node, "lineno", 0), place.scope, before, after, source)


def _put(parent: Any, name: str, index: int | None, node: ast.AST | list[ast.stmt]) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _changed_lines(original: str, source: str) -> tuple[str, str]:
    """The lines that differ, stripped of what both begin and end with."""
    ours, theirs = original.splitlines(), source.splitlines()
    start = 0
    while start < min(len(ours), len(theirs)) and ours[start] == theirs[start]:
        start += 1
    end = 0
    while end < min(len(ours), len(theirs)) - start and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    return "\n".join(ours[start : len(ours) - end]), "\n".join(theirs[start : len(theirs) - end])
