"""Two packages judged by what they import of each other, on trees made up for each test.

Whether real ones behave so: tests/releases.
"""

from __future__ import annotations

from textwrap import dedent

import pytest
from vllm_livepatch.tools.compatibility import pairs
from vllm_livepatch.tools.compatibility.cross_package import Missing, Packages, Problem

FACTORY_OLD = """
class KVConnectorFactory:
    @classmethod
    def get_connector_class(cls, config):
        compat_sig = False
        if connector_name in cls._registry:
            connector_cls = cls._registry[connector_name]()
        else:
            connector_module = importlib.import_module(connector_module_path)
            if not supports_kw(connector_cls, "kv_cache_config"):
                compat_sig = True

KVConnectorFactory.register_connector("LMCacheMPConnector", "vllm.built_in", "LMCacheMPConnector")
"""
FACTORY_NEW = """
class KVConnectorFactory:
    @classmethod
    def get_connector_class(cls, config):
        if connector_module_path:
            connector_module = importlib.import_module(connector_module_path)
        elif connector_name in cls._registry:
            connector_cls = cls._registry[connector_name]()

KVConnectorFactory.register_connector("LMCacheMPConnector", "vllm.built_in", "LMCacheMPConnector")
"""
BASE = """
from abc import ABC, abstractmethod

class Base(ABC):
    def __init__(self, vllm_config, role, kv_cache_config):
        pass
"""
CONNECTOR = """
from vllm.base import Base

class LMCacheMPConnector(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
"""


class Modules:
    """A tree of sources by module name; packages are those that have modules below them."""

    def __init__(self, **sources: str) -> None:
        self.sources = {name.replace("__", "."): dedent(text) for name, text in sources.items()}
        for name in list(self.sources):
            for count in range(1, name.count(".") + 1):
                self.sources.setdefault(".".join(name.split(".")[:count]), "")

    def source(self, module: str) -> str | None:
        return self.sources.get(module)

    def origin(self, module: str) -> str | None:
        package = any(name.startswith(f"{module}.") for name in self.sources)
        return f"{module}/__init__.py" if package else f"{module}.py"


def packages(vllm: Modules, lmcache: Modules) -> Packages:
    return Packages({"vllm": vllm, "lmcache": lmcache})


def lacking(module: str, vllm: Modules) -> list[str]:
    """What importing an LMCache module of this text lacks."""
    try:
        packages(vllm, Modules(lmcache__start=module)).load("lmcache.start")
    except Missing as missing:
        return [problem.subject for problem in missing.problems]
    return []


VLLM = Modules(vllm__a="def there(): ...\nfrom .b import moved\n", vllm__b="moved = 1\n")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("from vllm.a import there, moved", []),
        ("from vllm.a import there, gone", ["vllm.a:gone"]),
        ("from vllm.a import gone\nfrom vllm.b import lost", ["vllm.a:gone", "vllm.b:lost"]),
        ("import vllm.c", ["vllm.c"]),
        ("from vllm.c import x", ["vllm.c:x"]),
        ("from vllm import a", []),
        ("import vllm.a as a\nvalue = a.there", []),
        ("import vllm.a as a\nvalue = a.gone", ["vllm.a:gone"]),
        ("from vllm import a\nvalue = [a.gone]", ["vllm.a:gone"]),
        ("from numpy import anything", []),
    ],
)
def test_what_an_import_lacks(module: str, expected: list[str]) -> None:
    assert lacking(module, VLLM) == expected


@pytest.mark.parametrize(
    "module",
    [
        "try:\n    from vllm.a import gone\nexcept ImportError:\n    gone = None",
        "try:\n    from vllm.a import gone\nexcept Exception:\n    from vllm.b import moved",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    from vllm.a import gone",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.a import gone",
        "import sys\nif sys.platform == 'linux':\n    from vllm.a import gone",
        "def later():\n    from vllm.a import gone",
    ],
)
def test_what_is_not_needed(module: str) -> None:
    assert lacking(module, VLLM) == []


@pytest.mark.parametrize(
    "module",
    [
        "try:\n    from vllm.a import gone\nexcept KeyError:\n    pass",
        "try:\n    from vllm.b import lost\nexcept ImportError:\n    from vllm.a import gone",
        "try:\n    from vllm.a import gone\nexcept ImportError:\n    raise",
        "import sys\nif sys.argv:\n    from vllm.a import gone\nelse:\n    from vllm.a import gone",
        "class C:\n    from vllm.a import gone",
    ],
)
def test_what_is_needed_all_the_same(module: str) -> None:
    assert lacking(module, VLLM) == ["vllm.a:gone"]


def test_a_module_fails_with_what_it_imports() -> None:
    lmcache = Modules(
        lmcache__start="from .middle import x",
        lmcache__middle="from lmcache.end import x",
        lmcache__end="import vllm.no",
    )
    with pytest.raises(Missing) as caught:
        packages(VLLM, lmcache).load("lmcache.start")
    assert [(one.module, one.subject) for one in caught.value.problems] == [("lmcache.end", "vllm.no")]


def test_modules_that_import_each_other_end() -> None:
    lmcache = Modules(lmcache__start="from lmcache import other", lmcache__other="from lmcache import start")
    assert packages(VLLM, lmcache).load("lmcache.start") is not None


def test_names_given_on_demand_are_there() -> None:
    vllm = Modules(vllm__lazy="NAMES = {'LLM': 'x'}\ndef __getattr__(name): ...")
    assert lacking("from vllm.lazy import LLM", vllm) == []
    assert lacking("from vllm.lazy import Other", vllm) == ["vllm.lazy:Other"]


def a_pair(own: str | None, built_in: str = CONNECTOR, factory: str = FACTORY_NEW, **lmcache: str) -> pairs.Pair:
    """Two releases, of which LMCache's has an own connector or not."""
    vllm = Modules(
        vllm__distributed__kv_transfer__kv_connector__factory=factory, vllm__built_in=built_in, vllm__base=BASE
    )
    modules = dict(lmcache)
    if own is not None:
        modules["lmcache__integration__vllm__lmcache_mp_connector"] = own
    return pairs.look(vllm, Modules(**modules), ("1.0", "2.0"))


def outline(pair: pairs.Pair) -> list[tuple[str | None, str | None, bool]]:
    return [(one.module_path, one.cls, one.works) for one in pair.connectors]


OWN_CLASS = f"{pairs.OWN}:LMCacheMPConnector"


def test_a_path_is_looked_at_first_or_not_at_all() -> None:
    built_in = "vllm.built_in:LMCacheMPConnector"
    assert outline(a_pair(CONNECTOR)) == [(None, built_in, True), (pairs.OWN, OWN_CLASS, True)]
    assert outline(a_pair(CONNECTOR, factory=FACTORY_OLD)) == [(None, built_in, True), (pairs.OWN, built_in, True)]
    assert outline(a_pair(None)) == [(None, built_in, True)]


CHOOSING = """
import os
from vllm.base import Base

class Upstream(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)

def _resolve():
    if os.environ.get("LMCACHE_USE_UPSTREAM_MP"):
        return Upstream
    try:
        from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector as Own
        return Own
    except ImportError:
        return Upstream

LMCacheMPConnector = _resolve()
"""


def test_a_module_of_vllm_that_takes_lmcaches_class_if_it_loads() -> None:
    assert outline(a_pair(CONNECTOR, CHOOSING))[0] == (None, OWN_CLASS, True)
    assert outline(a_pair("from vllm.base import Nothing\n" + CONNECTOR, CHOOSING)) == [
        (None, "vllm.built_in:Upstream", True),
        (pairs.OWN, OWN_CLASS, False),
    ]
    assert outline(a_pair(None, CHOOSING, lmcache__x=""))[0] == (None, "vllm.built_in:Upstream", True)


def test_broken_is_a_pair_in_which_no_way_works() -> None:
    wrong = "from vllm.base import Nothing\n" + CONNECTOR
    assert not a_pair(wrong).broken
    assert a_pair(wrong, built_in="from lmcache.no import x\n" + CONNECTOR).broken
    assert a_pair(None, built_in="from lmcache.no import x\n" + CONNECTOR).broken


STRATEGY = """
from dataclasses import dataclass

@dataclass
class Strategy:
    use_mla: bool
    world_size: int
    rank: int = 0
"""


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("Strategy(True, 1)", True),
        ("Strategy(True, 1, rank=2)", True),
        ("Strategy(True, 1, 2, 3)", False),
        ("Strategy(True)", False),
        ("Strategy(True, 1, size=2)", False),
        ("Strategy(*config)", True),
        ("Strategy(True, **config)", True),
        ("Strategy(*config, size=1)", False),
    ],
)
@pytest.mark.parametrize("place", ["directly", "in a function", "in a method"])
def test_calls_on_the_way_to_a_connector(call: str, fits: bool, place: str) -> None:
    made = {"directly": call, "in a function": "build(vllm_config)", "in a method": "self.build()"}[place]
    own = f"""
from vllm.base import Base
from lmcache.strategy import Strategy

def build(config):
    return {call if place == "in a function" else None}

class LMCacheMPConnector(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.strategy = {made}

    def build(self):
        return {call if place == "in a method" else None}

    def never_on_that_way(self):
        return Strategy(1, 2, 3, 4, 5)
"""
    found = a_pair(own, lmcache__strategy=STRATEGY).connectors[1]
    assert found.works == fits
    assert [problem.subject for problem in found.problems] == ([] if fits else ["lmcache.strategy:Strategy"])


@pytest.mark.parametrize(
    ("own", "subject"),
    [
        (
            CONNECTOR.replace("super().__init__(vllm_config, role, kv_cache_config)", "super().__init__(role)"),
            "__init__",
        ),
        (CONNECTOR.replace("role, kv_cache_config=None", "role"), "LMCacheMPConnector"),
        (CONNECTOR + "        from vllm.base import Gone\n", "Gone"),
    ],
)
def test_connectors_that_load_and_cannot_be_made(own: str, subject: str) -> None:
    (problem, *_) = a_pair(own).connectors[1].problems
    assert problem.subject.endswith(subject)


@pytest.mark.parametrize(
    ("default", "condition", "works", "said"),
    [
        (
            "False",
            "use_native",
            False,
            "; works only where kv_connector_extra_config sets use_native (default: False)",
        ),
        ("True", "use_native", True, ""),
        ("None", "not use_native", True, ""),
        ("True", "not use_native", False, "; works only where"),
        ("unknown", "use_native", True, ""),
    ],
)
def test_the_branch_of_an_options_default_counts(default: str, condition: str, works: bool, said: str) -> None:
    """As where vLLM has an implementation of its own beside LMCache's."""
    built_in = f"""
from vllm.base import Base

class LMCacheMPConnector(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        use_native = vllm_config.kv_transfer_config.get_from_extra_config("use_native", {default})
        if {condition}:
            from vllm import own as adapter
        else:
            from lmcache.gone import adapter
"""
    pair = a_pair(None, built_in)
    (connector,) = (one for one in pair.connectors if one.module_path is None)
    assert connector.works is works
    assert [one.subject for one in connector.problems] == ([] if works else ["lmcache.gone:adapter"])
    assert all(said in one.detail for one in connector.problems)


@pytest.mark.parametrize(
    "again",
    [
        "use_native &= has()",
        "(use_native := has())",
        "use_native, other = has()",
        "if y:\n            use_native = has()",
    ],
)
def test_a_name_that_is_bound_again_is_no_option(again: str) -> None:
    built_in = f"""
from vllm.base import Base

class LMCacheMPConnector(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        use_native = vllm_config.kv_transfer_config.get_from_extra_config("use_native", False)
        {again}
        if use_native:
            from vllm import own as adapter
        else:
            from lmcache.gone import adapter
"""
    (connector,) = (one for one in a_pair(None, built_in).connectors if one.module_path is None)
    assert connector.works


def test_an_option_of_which_no_value_helps() -> None:
    built_in = """
from vllm.base import Base

class LMCacheMPConnector(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        if vllm_config.kv_connector_extra_config.get("use_native", False):
            from lmcache.gone import native
        else:
            from lmcache.gone import adapter
"""
    (connector,) = (one for one in a_pair(None, built_in).connectors if one.module_path is None)
    assert [one.subject for one in connector.problems] == ["lmcache.gone:adapter"]
    assert "works only" not in connector.problems[0].detail


def test_an_abstract_method_that_nobody_defines() -> None:
    vllm = Modules(
        vllm__distributed__kv_transfer__kv_connector__factory=FACTORY_NEW,
        vllm__built_in=CONNECTOR,
        vllm__base=BASE + "\n    @abstractmethod\n    def get_finished(self): ...\n",
    )
    (found,) = pairs.look(vllm, Modules(lmcache__x="")).connectors
    assert [problem.subject for problem in found.problems] == ["vllm.base:Base.get_finished"]


def test_an_older_factory_gives_a_class_of_two_arguments_two() -> None:
    two = CONNECTOR.replace("role, kv_cache_config=None", "role").replace(", kv_cache_config)", ", None)")
    older = FACTORY_NEW.replace("elif", "    compat_sig = True\n        elif")
    assert [one.works for one in a_pair(two, factory=older).connectors] == [True, True]
    assert [one.works for one in a_pair(two).connectors] == [True, False]


def test_the_releases_in_which_a_name_was_there() -> None:
    trees = {"1": "", "2": "name = 1", "3": "name = 1", "4": "", "5": "name = 1"}
    (problem,) = _problems("from vllm.a import name", Modules(vllm__a=""))
    assert (
        pairs.where(problem, list(trees), lambda package, release: Modules(vllm__a=trees[release])) == "vllm 2 to 3, 5"
    )
    assert pairs.where(problem, ["1"], lambda package, release: Modules(vllm__a="")) == "no pinned vllm"


def _problems(module: str, vllm: Modules) -> tuple[Problem, ...]:
    with pytest.raises(Missing) as caught:
        packages(vllm, Modules(lmcache__start=module)).load("lmcache.start")
    return caught.value.problems
