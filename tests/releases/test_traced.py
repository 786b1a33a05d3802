"""torch.compile traces whatever stands at a target, an error of a wrapper's own too. Of real torch, and a layer of vLLM's."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest
from vllm_livepatch.tools.releases import sources

from tests.unit.support import Sandbox

MODULE = "fakeengine.layers"
# `helper` and the methods of `Layer` are in the graph; so is what stands for them, with no break (`fullgraph`).
LAYERS = """\
    import torch

    def helper(x):
        return x + 1

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def project(self, x, *, scale=1.0):
            return self.linear(x) * scale

        @staticmethod
        def of_static(x):
            return x + 2

        @classmethod
        def of_class(cls, x):
            return x + 3

        @property
        def factor(self):
            return 5.0

        def again(self, x):
            return x * 7

        def forward(self, x):
            x = self.project(helper(x), scale=2.0)
            try:
                x = self.refuse(x)
            except KeyError:
                x = x + 11
            return self.again(self.of_class(self.of_static(x)) * self.factor)

        def refuse(self, x):
            raise KeyError("of the release's own")
    """
NAMES = ("helper", *(f"Layer.{name}" for name in ("project", "of_static", "of_class", "factor", "again", "refuse")))
TARGETS = [f"{MODULE}:{name}" for name in NAMES]
USE = """
import sys, torch
from fakeengine.layers import Layer
torch.manual_seed(1)
layer, x = Layer(), torch.ones(2, 4)
compiled = torch.compile(layer, backend="eager", fullgraph=True)
first = compiled(x)
print(torch.equal(first, layer(x)), torch.equal(compiled(x), first))
print([round(number, 3) for number in first[0].tolist()])
"""
WRAPPERS = """\
    def around(wrapped, instance, args, kwargs):
        livepatch.count("calls")
        livepatch.say("calls", "one more call")
        return wrapped(*args, **kwargs) * 0.5
    """
BEFORE = "def look(instance, args, kwargs): livepatch.count('calls')\naround = livepatch.before(look)"
AFTER = "def look(instance, args, kwargs, answer): livepatch.count('calls')\naround = livepatch.after(look)"
SHORTCUT = """\
    def half(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs) * 0.5
    def make(release, guarded):
        def project(self, x, *, scale=1.0):
            return guarded(self, x, scale=scale) if scale > 1.5 else release(self, x, scale=scale)
        return project
    around = livepatch.shortcut(make, half)
    """


class Engine(Sandbox):
    """A sandbox whose programs have torch."""

    torch: Path

    def printed(self, code: str, *, stock: bool = False) -> list[str]:
        """What a program prints. It is compiled whole, or it fails."""
        if not stock:
            self.generate()
        done = (self.bare if stock else self.python)(code, python=str(self.torch))
        assert done.code == 0, done.err
        return done.out.splitlines()


def made(place: Path, python: Path) -> Engine:
    engine = Engine(place / "sandbox")
    engine.torch = python
    engine.write({"fakeengine/layers.py": LAYERS})
    return engine


@pytest.fixture
def engine(tmp_path: Path, engine_python: Path) -> Engine:
    return made(tmp_path, engine_python)


def wrappers(body: str) -> str:
    return f"def wrappers(livepatch):\n{indent(dedent(body), '    ')}\n    return dict.fromkeys(TARGETS, around)\n"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, engine_python: Path) -> list[str]:
    """What the program prints without a bundle."""
    return made(tmp_path_factory.mktemp("stock"), engine_python).printed(USE, stock=True)


def test_every_kind_of_target_and_two_patches_around_each(engine: Engine, stock: list[str]) -> None:
    names = [target for target in TARGETS if not target.endswith(".factor")]
    engine.patch(targets=TARGETS, code=wrappers(WRAPPERS))
    engine.patch("second", names, code=wrappers(WRAPPERS), traced=True)
    same, numbers = engine.printed(USE)
    assert (stock[0], same) == ("True True", "True True")
    assert numbers != stock[1]
    assert [engine.reported(name)["state"] for name in ("around", "second")] == ["applied"] * 2


@pytest.mark.parametrize("body", [BEFORE, AFTER], ids=["before", "after"])
def test_looks(engine: Engine, stock: list[str], body: str) -> None:
    engine.patch(targets=[f"{MODULE}:Layer.project"], code=wrappers(body))
    assert engine.printed(USE) == stock
    assert engine.reported()["counters"] == {"calls": 1}, "of the one call that was not compiled"


def test_a_shortcut(engine: Engine, stock: list[str]) -> None:
    engine.patch(targets=[f"{MODULE}:Layer.project"], code=wrappers(SHORTCUT))
    same, numbers = engine.printed(USE)
    assert (same, numbers != stock[1]) == ("True True", True)


OWN_ERRORS = {
    "before it called": "def around(wrapped, instance, args, kwargs): raise ValueError('its own')",
    "after it called": "def around(wrapped, *_, **named):\n    wrapped(*_[1:], **named)\n    raise ValueError('its own')",
    "in a look before": "def look(*_, **named): raise ValueError('its own')\naround = livepatch.before(look)",
    "in a look after": "def look(*_, **named): raise ValueError('its own')\naround = livepatch.after(look)",
}


@pytest.mark.parametrize("body", OWN_ERRORS.values(), ids=OWN_ERRORS)
def test_an_error_of_a_wrappers_own_while_it_is_traced(engine: Engine, stock: list[str], body: str) -> None:
    """The graph has the release's own code, and the patch stands aside, as in any other call."""
    engine.patch(targets=[f"{MODULE}:Layer.project"], code=wrappers(body))
    assert engine.printed(USE) == stock
    reported = engine.reported()
    assert (reported["state"], reported["reason"]) == ("failed", "raised")
    assert reported["detail"].startswith(f"{MODULE}:Layer.project: ValueError: its own")


OPERATIONS = """\
    import torch

    @torch.library.custom_op("fakeengine::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x):
        return torch.empty_like(x)

    packet = torch.ops.fakeengine.double
    overload = torch.ops.fakeengine.double.default

    def doubled(x):
        return double(x)

    def by_packet(x):
        return packet(x)

    def by_overload(x):
        return overload(x)
    """
PROXIED = """\
    def around(original, *args, **named):
        livepatch.count("calls")
        return original(*args, **named) * 10
    around = livepatch.wrapt(around)
    """
USE_OPERATIONS = """
import torch
from fakeengine import operations
for name in ("doubled", "by_packet", "by_overload"):
    function = getattr(operations, name)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    print(function(torch.ones(2)).tolist(), compiled(torch.ones(2)).tolist(), compiled(torch.ones(3)).tolist())
"""


def test_operations_of_torch(engine: Engine) -> None:
    engine.write({"fakeengine/operations.py": OPERATIONS})
    targets = [f"fakeengine.operations:{name}" for name in ("double", "packet", "overload")]
    engine.patch(targets=targets, code=wrappers(PROXIED))
    stock = "[2.0, 2.0] [2.0, 2.0] [2.0, 2.0, 2.0]"
    assert engine.printed(USE_OPERATIONS, stock=True) == [stock] * 3
    assert engine.printed(USE_OPERATIONS) == [stock.replace("2", "20")] * 3
    assert engine.reported()["state"] == "applied"


NORM = "vllm.model_executor.layers.layernorm:RMSNorm.forward_native"
USE_NORM = """
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
    from vllm.model_executor.layers.layernorm import RMSNorm
    norm, x = RMSNorm(8, dtype=torch.float32), torch.arange(16.0).reshape(2, 8)
    compiled = torch.compile(norm.forward_native, backend="eager", fullgraph=True)
    first = compiled(x)
    print(torch.equal(first, norm.forward_native(x)), [round(number, 3) for number in first[0].tolist()])
"""


def test_a_layer_of_vllms(engine: Engine) -> None:
    engine.site = sources.site_packages("vllm", "0.33.0")
    engine.patch(
        targets=[NORM],
        code=wrappers(WRAPPERS),
        package="vllm",
        traced=True,
        variant=[{"releases": ["0.33.0"], "code": engine.fingerprints(NORM)}],
    )
    (stock,), (patched,) = engine.printed(USE_NORM, stock=True), engine.printed(USE_NORM)
    assert stock.startswith("True [")
    assert patched.startswith("True [")
    assert patched != stock
    assert engine.reported()["state"] == "applied"
