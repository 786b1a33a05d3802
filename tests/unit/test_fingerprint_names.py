"""Which definition a name means, and that every interpreter that is served gives the same fingerprints."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import cache, fingerprint

from tests.unit import interpreters
from tests.unit.support import finish

SOURCE = """
import sys
LIMIT = 3
declared: int = 4

def twice(): return 1
def twice(): return 2

if sys.platform == "linux":
    def chosen(): return "here"

try:
    from fast import quick
except ImportError:
    def quick(): return "slow"

class Outer:
    ONE = "one"
    two: int

    def method(self): return self.ONE

    class Inner:
        async def method(self): return 2
"""
FEATURES = """
def strings(a, b):
    x = f"{a} and {b!r:>{a}}" f"{a=}" "plain" rf"\\d{b}" f"{a:}" f"" f"{a}" + f"{'x' if a else f'{b}'}"
    return x + "tab\\tnul\\0\\x7f" + "é ü ß" + "\\U0001fae1\\U0001fae8\\U0001fac6" + "🫡🫨🫆 ꟊ ⹝ 𞓐" + "\\ud800" + b"\\xff".decode()
def numbers(): return 1e400, -0.0, 0.1, 1j, 10**30, 0xFFFFFFFFFFFFFFFFFFFF, 1_0, ..., None, True
def match_it(x):
    match x:
        case {"a": 1, **rest}: return rest
        case [1, *_] | (2, 3): return 1
        case str() as name if name: return name
        case None: return 0
        case _: return 2
async def waits(a):
    async with a as b, b: pass
    return [x async for x in a if await x], {**a}, {*a}, lambda x, /, *y, z=1, **w: (yield)
class Typed(dict[str, int], metaclass=type):
    x: int
    y: "list[int]" = []
    @property
    def z(self) -> int: return self.x @ self.y
def walrus(x, /, y: int, *a: int, z=1, **k) -> None:
    if (n := len(x)) > 10 and not (1 < n <= 3 != 4): del x[1:2, ::3], y
    with (open(x) as f, open(y) as g): print(f, g, sep="")
    try: pass
    except (A, B) as e: raise C from e
    else: pass
    finally: return x if y else -z ** +n // ~1
"""
WIDE = "def wide(): return " + " + ".join(f"a{number}" for number in range(400))
DEEP = "def deep(): return " + "[" * 80 + "]" * 80
ALL = """
import importlib.util, ast, json, sys
spec = importlib.util.spec_from_file_location("fingerprint", sys.argv[1])
fingerprint = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fingerprint)
answers = {}
for key, source in json.load(open(sys.argv[2], encoding="ascii")).items():
    names = {"": ""}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node.name
    answers[key] = fingerprint.of_names(source, names)
json.dump(answers, sys.stdout)
"""


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("twice", "def twice(): return 2"),
        ("chosen", "def chosen(): return 'here'"),
        ("quick", "def quick(): return 'slow'"),
        ("Outer.method", "def method(self): return self.ONE"),
        ("Outer.Inner.method", "async def method(self): return 2"),
        ("Outer.ONE", "ONE = 'one'"),
        ("LIMIT", "LIMIT = 3"),
        ("declared", "declared = 4"),
    ],
)
def test_the_definition_that_a_name_means(name: str, same_as: str) -> None:
    key = name.rpartition(".")[2]
    assert fingerprint.of_names(SOURCE, {"it": name})["it"] == fingerprint.of_names(same_as, {"it": key})["it"]


@pytest.mark.parametrize("name", ["thrice", "Outer.three", "Outer.method.inner", "Inner", "os", "LIMIT.real", "method"])
def test_a_name_that_is_not_there(name: str) -> None:
    assert fingerprint.of_names(SOURCE, {"it": name, "LIMIT": "LIMIT"})["it"] is None


def test_a_bare_annotation_of_a_class_is_a_name() -> None:
    found = fingerprint.of_names(SOURCE, {"it": "Outer.two"})["it"]
    assert found is not None
    assert found == fingerprint.of_names("class Other:\n  two: str", {"it": "Other.two"})["it"]


def test_an_empty_name_is_the_module() -> None:
    found = fingerprint.of_names(SOURCE, {"it": ""})
    assert found == fingerprint.of_names("'''A docstring.'''\n# a remark\n" + SOURCE, {"it": ""})
    assert found != fingerprint.of_names(SOURCE + "LIMIT = 4\n", {"it": ""})
    assert len(str(found["it"])) == 16


@pytest.mark.parametrize("source", ["def f(:", "a\0b", "  x = 1", "x = '", "(" * 1000, "\ud800 = 1"])
def test_a_source_that_does_not_parse(source: str) -> None:
    with pytest.raises(fingerprint.SourceError, match="does not parse"):
        fingerprint.of_names(source, {"it": "f"})


def test_somebody_elses_invalid_escape_is_not_ours_to_report(recwarn: pytest.WarningsRecorder) -> None:
    assert fingerprint.of_names("def f(): return '\\d'", {"f": "f"})["f"]
    assert not recwarn.list


def test_a_source_nested_too_deeply_is_an_error_that_says_so() -> None:
    for source in ("x = " + "-" * 200_000 + "1", "x = " + " + ".join(["a"] * 3000)):
        with pytest.raises(fingerprint.SourceError, match="does not parse"):
            fingerprint.of_names(source, {"it": ""})


def test_a_thread_that_parses_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's count of the depth in ast.parse is shared by all threads, up to 3.12: SystemError, in either."""
    parse, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch (before=126, after=32)")] * 3

    def upset(source: str, file: str) -> ast.Module:
        if failures:
            raise failures.pop()
        return parse(source, file)

    monkeypatch.setattr(ast, "parse", upset)
    assert fingerprint.of_names("def f(): return 1", {"f": "f"})["f"]
    assert not failures


@pytest.mark.parametrize(
    "source", [WIDE, DEEP, "x = 0x" + "f" * 9000, "-" * 80 + "1"], ids=["wide", "deep", "huge", "many"]
)
def test_strange_sources_have_fingerprints(source: str) -> None:
    assert fingerprint.of_names(source, {"it": ""})["it"]


def test_every_interpreter_gives_the_same_fingerprints(tmp_path: Path) -> None:
    """One text, parsed by each: every feature that the oldest one knows, and a good part of its standard library."""
    served = interpreters.found(interpreters.SERVED)
    assert served, f"none of {', '.join(interpreters.SERVED)} was found, not even the one that runs this"
    oldest = interpreters.find(served[0])
    where = subprocess.check_output([str(oldest), "-c", "import os; print(os.path.dirname(os.__file__))"], text=True)
    files = [file for file in sorted(Path(where.strip()).glob("*.py"))[::5] if file.stat().st_size < 60_000]
    corpus = {file.name: file.read_text("utf-8") for file in files}
    corpus = {"features": FEATURES, "names": SOURCE, "wide": WIDE, "deep": DEEP, **corpus}
    (tmp_path / "corpus.json").write_text(json.dumps(corpus), "ascii")
    answers = {}
    for version in served:
        command = [str(interpreters.find(version)), "-c", ALL, str(fingerprint.__file__), str(tmp_path / "corpus.json")]
        done = finish(command, {"LC_ALL": "C"})
        assert done.code == 0, f"{version}: {done.err}"
        answers[version] = json.loads(done.out)
    first = answers[served[0]]
    assert len(first) == len(corpus) > 30
    for version in served[1:]:
        different = [
            f"{key}:{name}" for key in first for name in first[key] if first[key][name] != answers[version][key][name]
        ]
        assert different == [], f"{served[0]} and {version} differ"


CLASS = """
@dataclass({options})
class Held({bases}):
    LIMIT = 3

    def __init__(this, size, *, more=None):
        this.size = size
        this.pool: list[int] = [0] * size
        if more:
            this.pool, this.rest = more, other.rest
        with lock:
            this.count += {count}
        other.size = 1

    def grow(self):
        self.later = 1
"""


def member(name: str, *, options: str = "", bases: str = "Base", count: int = 1) -> str | None:
    source = CLASS.format(options=options, bases=bases, count=count)
    return fingerprint.of_names(source, {"it": f"Held.{name}"})["it"]


@pytest.mark.parametrize("name", ["size", "pool", "rest", "count", "LIMIT"])
def test_an_attribute_is_what_init_assigns(name: str) -> None:
    assert member(name) is not None
    assert (member(name, count=2) == member(name)) == (name != "count")


@pytest.mark.parametrize("name", ["later", "more", "other", "siz"])
def test_what_init_does_not_assign_is_not_there(name: str) -> None:
    assert member(name) is None


def test_all_assignments_of_an_attribute_count() -> None:
    pool = "class A:\n  def __init__(self):\n    self.x = 1\n    if a:\n      self.x = {second}\n    self.y = {third}"
    first, second, third = (
        fingerprint.of_names(pool.format(second=second, third=third), {"it": "A.x"})["it"]
        for second, third in ((2, 3), (4, 3), (2, 5))
    )
    assert first == third != second


@pytest.mark.parametrize(
    ("changed", "same"),
    [({"bases": "Base, Mixin"}, False), ({"options": "frozen=True"}, False), ({"count": 2}, True)],
)
def test_the_bases_of_a_class_by_themselves(changed: dict[str, Any], same: bool) -> None:
    assert (member("__bases__", **changed) == member("__bases__")) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("import fast as it", "import slow as it", False),
        ("from a import it", "from b import it", False),
        ("from a import it, more", "from a import it", True),
        ("from a import more as it", "from a import it", False),
        ("try:\n  import it\nexcept ImportError:\n  it = None", "it = None", True),
    ],
)
def test_what_a_module_imports_under_a_name(one: str, other: str, same: bool) -> None:
    found = [fingerprint.of_names(source, {"it": "it"})["it"] for source in (one, other)]
    assert None not in found
    assert (found[0] == found[1]) is same


def test_a_remembered_fingerprint_of_another_form_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The algorithm is a part of the key: a bundle that counts otherwise works it out anew."""
    source = "def f(): return 1\n"
    first = cache.Fingerprints(str(tmp_path)).of_names(source, {"f": "f"})
    (file,) = (tmp_path / "fingerprints").iterdir()
    file.write_text(json.dumps({"f": "what another form says"}))
    assert cache.Fingerprints(str(tmp_path)).of_names(source, {"f": "f"}) == {"f": "what another form says"}
    other = cache.Fingerprints(str(tmp_path))
    monkeypatch.setattr(other, "_form", "another algorithm")
    assert other.of_names(source, {"f": "f"}) == first
