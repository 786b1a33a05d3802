"""Fingerprints mean the code: looks, typing and the parsing interpreter do not change them, what the code does does.

Properties are tried on functions of the standard library, since those are code that people wrote.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import fingerprint

MODULES = [
    "argparse",
    "asyncio/base_events",
    "calendar",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "http/client",
    "inspect",
    "json/decoder",
    "logging/__init__",
    "random",
    "shutil",
    "socket",
    "statistics",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "traceback",
    "types",
    "unittest/mock",
    "urllib/parse",
    "weakref",
]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def stdlib_functions() -> list[tuple[str, ast.Module]]:
    """Every function of those modules that is worth its name, each as a module of its own."""
    found: list[tuple[str, ast.Module]] = []
    for module in MODULES:
        file = Path(sysconfig.get_path("stdlib"), f"{module}.py")
        if not file.is_file():
            continue  # modules become packages now and then; the corpus is large enough
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, Function) and 3 <= len(list(ast.walk(node))) <= 2000:
                found.append((f"{module}:{node.name}", ast.Module([node], [])))
    return found


FUNCTIONS = stdlib_functions()
functions = st.sampled_from(FUNCTIONS).map(lambda item: copy.deepcopy(item[1]))


def of(source: str) -> str:
    (node,) = ast.parse(source).body
    return fingerprint.of_node(node)


# Looks


def commented(source: str) -> str:
    """A comment and an empty line after every logical line."""
    lines = source.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        if token.type == tokenize.NEWLINE:
            lines[token.start[0] - 1] = lines[token.start[0] - 1].rstrip("\n") + "  # a remark\n\n# and another\n"
    return "".join(lines)


def indented(source: str) -> str:
    """As deep as another class would put it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = ast.Module([ast.ClassDef("Outer", [], [], list(ast.parse(source).body), [])], [])
    text = ast.unparse(ast.fix_missing_locations(nested))
    return text + "\n"


class Passing(ast.NodeTransformer):
    """`pass`, bare strings and bare annotations wherever a statement may stand; a docstring first of all."""

    def visit_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        bare = ast.AnnAssign(ast.Name("note", ast.Store()), ast.Constant("int"), None, 1)
        visited = [self.visit(statement) for statement in body]
        return [ast.Expr(ast.Constant("A docstring.")), ast.Pass(), *visited, ast.Expr(ast.Constant("said")), bare]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.ClassDef):
            return node  # a class's bare annotation may be a field
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and not isinstance(node, ast.Module):
                setattr(node, field, self.visit_body(body))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ExceptHandler, *Function)) or isinstance(node, ast.Module):
                self.generic_visit(child)
        return node


def with_nothing_more(tree: ast.Module) -> ast.Module:
    return ast.fix_missing_locations(Passing().visit(tree))  # type: ignore[no-any-return]


def annotated(tree: ast.Module) -> ast.Module:
    """Every argument, every return and every plain assignment to a name with an annotation."""
    declared = {name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    lambdas = [node.args for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    bare = {id(arg) for args in lambdas for arg in ast.walk(args) if isinstance(arg, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and id(node) not in bare:
            node.annotation = ast.Constant("Something")
        elif isinstance(node, Function):
            node.returns = ast.Subscript(ast.Name("list", ast.Load()), ast.Name("int", ast.Load()), ast.Load())
            for index, statement in enumerate(node.body):
                target = statement.targets[0] if isinstance(statement, ast.Assign) else None
                if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(target, ast.Name):
                    if target.id not in declared:
                        node.body[index] = ast.AnnAssign(target, ast.Constant("Any"), statement.value, 1)
    return ast.fix_missing_locations(tree)


def unannotated(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, Function):
            node.returns = None
    return tree


def without_words(tree: ast.Module) -> ast.Module:
    """Without the statements that do nothing."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, field, None), list):
                setattr(node, field, [statement for statement in body if not does_nothing(statement)])
    return tree


@given(functions)
def test_formatting_and_comments_do_not_count(tree: ast.Module) -> None:
    expected = fingerprint.of_node(tree.body[0])
    plain = ast.unparse(tree) + "\n"
    assert of(plain) == expected
    assert of(commented(plain)) == expected
    name = tree.body[0].name  # type: ignore[attr-defined]
    assert fingerprint.of_names(indented(plain), {"it": f"Outer.{name}"}) == {"it": expected}


@given(functions)
def test_annotations_do_not_count(tree: ast.Module) -> None:
    expected = fingerprint.of_node(tree.body[0])
    assert of(ast.unparse(unannotated(copy.deepcopy(tree)))) == expected
    assert of(ast.unparse(annotated(tree))) == expected


@given(functions)
def test_docstrings_and_pass_do_not_count(tree: ast.Module) -> None:
    expected = fingerprint.of_node(tree.body[0])
    text = ast.unparse(with_nothing_more(tree))
    assert "A docstring." in text
    assert of(text) == expected


# Meaning

OPERATORS: dict[type, ast.AST] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div(), ast.Mod: ast.Mult(), ast.Div: ast.FloorDiv(),
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
    ast.And: ast.Or(), ast.Or: ast.And(), ast.Not: ast.USub(), ast.USub: ast.UAdd(), ast.BitOr: ast.BitAnd(),
    ast.BitAnd: ast.BitXor(), ast.LShift: ast.RShift(), ast.RShift: ast.LShift(),
}  # fmt: skip
Edit = Callable[[], None]


def edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    """Everything in a function that can be changed so that it does something else, typing and bare strings left out."""
    if isinstance(node, ast.Constant):
        yield "constant", lambda: setattr(node, "value", other_constant(node.value))
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "type_params", "ctx", "kind", "simple"):
            continue
        if isinstance(node, (ast.Name, ast.Attribute, ast.arg, ast.keyword, *Function)) and isinstance(value, str):
            yield field, lambda node=node, field=field, value=value: setattr(node, field, value + "_other")  # type: ignore[misc]
        if type(value) in OPERATORS:
            yield "operator", lambda node=node, field=field, value=value: setattr(node, field, OPERATORS[type(value)])  # type: ignore[misc]
        if field in ("ops", "defaults"):
            for index, item in enumerate(value):
                if type(item) in OPERATORS:
                    yield "operator", functools.partial(value.__setitem__, index, OPERATORS[type(item)])
        if isinstance(node, ast.arguments) and field == "defaults" and value:
            yield "default gone", lambda value=value: value.pop(0)  # type: ignore[misc]
        if isinstance(node, ast.Call) and field == "args":
            yield "argument", lambda value=value: value.append(ast.Constant(1))  # type: ignore[misc]
        if field in ("body", "orelse", "finalbody") and isinstance(value, list):
            yield "statement", lambda value=value: value.append(ast.parse("print(1)").body[0])  # type: ignore[misc]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not does_nothing(child):
                yield from edits(child)


def does_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return True
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(node, ast.Pass) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def other_constant(value: object) -> object:
    if isinstance(value, bool) or value is None or value is Ellipsis:
        return 12345
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bytes):
        return value + b"x"
    assert isinstance(value, (int, float, complex))
    return value + 1


@given(functions, st.data())
def test_what_the_code_does_counts(tree: ast.Module, data: st.DataObject) -> None:
    before = fingerprint.of_node(tree.body[0])
    possible = list(edits(tree.body[0]))
    _kind, edit = possible[data.draw(st.integers(0, len(possible) - 1))]
    edit()
    assert fingerprint.of_node(tree.body[0]) != before, ast.unparse(tree)


def test_different_functions_have_different_fingerprints() -> None:
    found: dict[str, str] = {}
    for name, tree in FUNCTIONS:
        written = ast.unparse(without_words(unannotated(copy.deepcopy(tree))))
        first = found.setdefault(fingerprint.of_node(tree.body[0]), written)
        assert first == written, name
    assert len(found) > 800


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a=1): return a", "def f(a=2): return a"),
        ("def f(a=1): return a", "def f(a=1.0): return a"),
        ("def f(a=1): return a", "def f(a=True): return a"),
        ("def f(a, b=1): pass", "def f(a, *, b=1): pass"),
        ("def f(a, b): pass", "def f(a, /, b): pass"),
        ("def f(*a): pass", "def f(**a): pass"),
        ("def f(): return", "def f(): yield"),
        ("def f(): yield x", "def f(): yield from x"),
        ("def f(): g(x)", "def f(): g(*x)"),
        ("def f(): g(x=1)", "def f(): g(y=1)"),
        ("def f(): raise A", "def f(): raise A from B"),
        ("def f(): assert x", "def f(): assert x, 'y'"),
        ("def f(): return b'a'", "def f(): return 'a'"),
        ("def f(): return f'{a}'", "def f(): return f'{a!r}'"),
        ("def f(): return f'{a:>3}'", "def f(): return f'{a:>4}'"),
        ("def f(): return f'a{b}'", "def f(): return f'a' + b"),
        ("def f(): x = 1", "async def f(): x = 1"),
        ("@a\ndef f(): pass", "@b\ndef f(): pass"),
        ("@a\ndef f(): pass", "def f(): pass"),
        ("def f():\n  if a:\n    b()\n  c()", "def f():\n  if a:\n    b()\n    c()"),
        ("def f():\n  if a: b()\n  else: c()", "def f():\n  if a: c()\n  else: b()"),
        ("def f():\n  global a\n  a = 1", "def f():\n  a = 1"),
        ("def f(): return {**a}", "def f(): return {'a': a}"),
        ("def f(): return (a, b)", "def f(): return [a, b]"),
        ("def f(): from a import b", "def f(): from .a import b"),
        ("def f(): import a", "def f(): import a as b"),
        ("class A:\n  x: int", "class A:\n  y: int"),
        ("class A:\n  x: int", "class A:\n  pass"),
        ("class A(B): pass", "class A(C): pass"),
        ("class A(B): pass", "class A(B, metaclass=C): pass"),
    ],
)
def test_pairs_that_differ(one: str, other: str) -> None:
    assert of(one) != of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(): pass", "def f(): ..."[:-3] + "'only a docstring'"),
        ("def f(): return u'a'", "def f(): return 'a'"),
        ("def f(): return 'a' 'b'", 'def f(): return "ab"'),
        ("def f(): return f'a' f'{b}' 'c'", "def f(): return f'a{b}c'"),
        ("def f(): return 0x10", "def f(): return 16"),
        ("def f(): return 1_000", "def f(): return 1000"),
        ("def f(): return 'é'", "def f(): return '\\xe9'"),
        ("def f(a: int = 1) -> str: return a", "def f(a=1): return a"),
        ("def f():\n  a: int = 1", "def f():\n  a = 1"),
        ("def f():\n  a: int\n  return 1", "def f():\n  return 1"),
        ("def f(a):  # type: ignore\n  return a", "def f(a):\n  return a"),
        ("class A:\n  'doc'\n  x: int = 1", "class A:\n  x: str = 1"),
        ("class A:\n  x: int", "class A:\n  x: str"),
        ("def f():\n  if a:\n    pass\n    b()", "def f():\n  if a: b()"),
    ],
)
def test_pairs_that_mean_the_same(one: str, other: str) -> None:
    assert of(one) == of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("class A:\n  x: int = 1", "class A:\n  x: ClassVar[int] = 1"),
        ("class A:\n  x: int", "class A:\n  x: dataclasses.InitVar[int]"),
        ("class A:\n  x: int\n  _: int\n  y: int", "class A:\n  x: int\n  _: KW_ONLY\n  y: int"),
        ("class A:\n  x: int = 1", "class A:\n  x: 'ClassVar[int]' = 1"),
        ("class A:\n  x: Annotated[int, Gt(0)]", "class A:\n  x: Annotated[int, Gt(1)]"),
        ("class A:\n  if b:\n    x: int = 1", "class A:\n  if b:\n    x: ClassVar[int] = 1"),
        ("class A(msgspec.Struct):\n  x: int", "class A(msgspec.Struct):\n  x: str"),
        ("class A(Struct, array_like=True):\n  x: int", "class A(Struct):\n  x: int"),
        ("class A(BaseModel):\n  x: int = 1", "class A(BaseModel):\n  x: float = 1"),
        ("@pydantic.dataclasses.dataclass\nclass A:\n  x: int", "@pydantic.dataclasses.dataclass\nclass A:\n  x: str"),
        ("class A:\n  x: int\n  y: int", "class A:\n  y: int\n  x: int"),
    ],
)
def test_annotations_that_are_behaviour_count(one: str, other: str) -> None:
    assert of(one) != of(other)


def test_a_field_by_itself_counts_as_its_class_reads_it() -> None:
    """Of a class that decodes by its annotations, and of one that only says what is no field."""

    def field(source: str) -> str | None:
        return fingerprint.of_names(source, {"it": "A.x"})["it"]

    assert field("class A(Struct):\n  x: int") != field("class A(Struct):\n  x: str")
    assert field("class A:\n  x: int") == field("class A:\n  x: str")
    assert field("class A:\n  x: int = 1") != field("class A:\n  x: ClassVar[int] = 1")


def attribute(body: str) -> str | None:
    """The fingerprint of `C.x`, of a class whose `__init__` has this body."""
    text = "class C:\n    def __init__(self, other):\n" + indent(body, " " * 8)
    return fingerprint.of_names(text, {"it": "C.x"})["it"]


@pytest.mark.parametrize(
    "body",
    [
        "self.x = 1\nself.y = 2\nother.x = 3\nx = 4",
        "self.x: int = 1",
        "def inner():\n    self.x = 2\nself.x = 1",
        "class Inner:\n    def __init__(self):\n        self.x = 2\nself.x = 1",
        "if other:\n    self.x = 1",
        "try:\n    pass\nexcept ValueError:\n    self.x = 1",
        "for one in other:\n    with one:\n        self.x = 1",
        "match other:\n    case 1:\n        self.x = 1",
    ],
)
def test_an_attribute_is_what_init_itself_assigns(body: str) -> None:
    assert attribute(body) == attribute("self.x = 1") != attribute("self.x = 2")


def test_all_that_init_assigns_to_an_attribute_counts_in_its_order() -> None:
    found = [
        attribute(body)
        for body in (
            "self.x = 1",
            "self.x = 1\nself.x = 2",
            "self.x = 2\nself.x = 1",
            "self.x = 1\nself.x += 2",
            "self.x = self.y = 1",
            "self.x, self.y = 1, 2",
        )
    ]
    assert len(set(found)) == len(found)
    assert None not in found
    assert [attribute(body) for body in ("self.y = 1", "other.x = 1", "def inner():\n    self.x = 1")] == [None] * 3


def test_the_same_words_in_a_function_do_not_count() -> None:
    assert of("def f(a: Annotated[int, 1]):\n  x: ClassVar = a") == of("def f(a):\n  x = a")


def test_an_invalid_escape_is_not_warned_of_and_no_filter_of_others_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that put filters back would each put back what the other has set: warnings would be off for good."""
    real: Callable[..., ast.Module] = ast.parse
    seen: list[list[object]] = []

    def parse(*arguments: str) -> ast.Module:
        seen.append([*warnings.filters])
        return real(*arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = [*warnings.filters]
        monkeypatch.setattr(ast, "parse", parse)
        for _ in range(2):
            assert fingerprint.of_names('def f():\n    return "\\d"\n', {"f": "f"})["f"] is not None
        assert [filters[-len(before) :] for filters in seen] == [before, before]
        assert {len(filters) - len(before) for filters in seen} == {1}
        with pytest.raises(UserWarning):
            warnings.warn("of somebody else's", stacklevel=1)


def test_the_bases_of_a_class_of_one_statement() -> None:
    def bases(text: str) -> str | None:
        return fingerprint.of_names(text, {"it": "C.__bases__"})["it"]

    whole = bases("class C(\n    A,  # a\n    B,\n):\n    x = 1\n")
    assert whole is not None
    assert whole == bases("class C(\n    A,  # a\n    B,\n):\n    y = 2\n")
    assert whole != bases("class C(\n    A,  # a\n    D,\n):\n    x = 1\n")
    assert bases("class C(A): x = 1\n") == bases("class C(A): y = 2\n")


@pytest.mark.parametrize(
    ("text", "lines"),
    [("class C(\n    A,\n):\n    x = 1\n    y = 2\n    z = 3\n", (1, 3)), ("class C(A): x = 1; y = 2\n", (1, 1))],
)
def test_the_bases_of_a_class_end_where_its_body_begins(text: str, lines: tuple[int, int]) -> None:
    """`newrelease` shows these lines where they have drifted."""
    found = fingerprint.find(ast.parse(text), "C.__bases__")
    assert isinstance(found, ast.ClassDef)
    assert (found.lineno, found.end_lineno) == lines


def written(text: str) -> str:
    """The fingerprint of what has this canonical text."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def fingerprint_of(source: str, name: str) -> str | None:
    return fingerprint.of_names(source, {"it": name})["it"]


def test_the_canonical_text_leaves_out_what_is_empty() -> None:
    """A field that is None or an empty list is not written: what a later Python adds to a node is no change."""
    name = "Name(id=str:'x';)"
    assert fingerprint_of("x = 1", "x") == written(f"Assign(targets=[{name},];value=Constant(value=int:1;);)")
    call = "Call(func=Name(id=str:'f';);)"
    assert fingerprint_of("x = f()", "x") == written(f"Assign(targets=[{name},];value={call};)")
    assert fingerprint_of("def x(): return", "x") == written(
        "FunctionDef(args=arguments();body=[Return(),];name=str:'x';)"
    )


@pytest.mark.parametrize(("bits", "form"), [(1024, "int:{:d}"), (1025, "int:{:#x}")])
def test_a_number_that_an_interpreter_may_refuse_to_write_is_written_in_another_form(bits: int, form: str) -> None:
    number = 1 << (bits - 1)
    value = f"Constant(value={form.format(number)};)"
    assert fingerprint_of(f"x = {number:#x}", "x") == written(f"Assign(targets=[Name(id=str:'x';),];value={value};)")


def test_bodies_that_are_no_lists_are_written_as_they_are() -> None:
    assert fingerprint_of("x = lambda: 1", "x") != fingerprint_of("x = lambda: 2", "x")
    assert fingerprint_of("x = 1 if y else 2", "x") != fingerprint_of("x = 1 if y else 3", "x")


def test_neighbouring_texts_of_an_f_string_are_one() -> None:
    """Python 3.12 gives one text where earlier ones give two; neither is joined to what is between."""
    one, two, three, four = (ast.Constant(value=text) for text in ("a", "b", "c", "d"))
    field, other = (ast.FormattedValue(value=ast.Name(id=name), conversion=-1) for name in ("x", "y"))
    merged = fingerprint._merged([field, other, one, two, three, field, four, ast.Constant(value="")])
    assert [ast.dump(part) for part in merged] == [
        ast.dump(part) for part in (field, other, ast.Constant(value="abc"), field, four)
    ]


def test_what_an_import_binds_is_its_last_alias_of_that_name() -> None:
    for statement, alone in (
        ("import os.path, sys", "import os.path"),
        ("import os.path, os.xyz, sys", "import os.xyz"),
        ("from a import b as os, c as os, d", "from a import c as os"),
    ):
        assert fingerprint_of(statement, "os") == fingerprint_of(alone, "os")
    assert fingerprint_of("import os.path", "os") != fingerprint_of("import os.xyz", "os")


def test_only_names_that_one_statement_binds_alone_have_fingerprints() -> None:
    source = "a = b = 1\nc.d: int = 2\ne, f = 3, 4\ng = 5\nh: int = 6\n"
    names = ("a", "b", "c", "d", "e", "f", "g", "h")
    found = fingerprint.of_names(source, {name: name for name in names})
    assert [name for name in names if found[name] is not None] == ["g", "h"]
    assert found["g"] == fingerprint_of("g = 5", "g")


def test_why_a_source_does_not_parse_is_in_the_error(mocker: MockerFixture) -> None:
    with pytest.raises(fingerprint.SourceError, match=r"the source does not parse: '\(' was never closed"):
        fingerprint_of("f(", "f")
    mocker.patch.object(fingerprint, "parsed", side_effect=MemoryError())  # it has no text
    with pytest.raises(fingerprint.SourceError, match=r"the source does not parse: MemoryError$"):
        fingerprint_of("", "f")


def test_the_filter_of_warnings_is_put_in_place_once(mocker: MockerFixture) -> None:
    added = mocker.spy(warnings, "filterwarnings")
    fingerprint.parsed("x = 1")
    before = added.call_count
    fingerprint.parsed("x = 1")
    assert (added.call_count, before <= 1) == (before, True)
