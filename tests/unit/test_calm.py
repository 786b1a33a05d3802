"""What the release tests' drivers take for time (tests/releases/driver/calm.py)."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "releases" / "driver" / "calm.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("calm", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calm = loaded()


class Machine:
    """Its clock, and how long it stalls under each wait, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stalls: float) -> None:
        self.now, self.stalls, self.waits = 100.0, list(stalls), list[float]()
        monkeypatch.setattr(calm, "_real", lambda: self.now)
        monkeypatch.setattr(calm, "_passed", (0.0, self.now))
        monkeypatch.setattr(calm, "_wait", self.wait)
        monkeypatch.setattr(calm, "_join", self.wait)

    def run(self, seconds: float) -> None:
        """The process runs for so long, and looks."""
        for _ in range(round(seconds / calm.LOOK_SECONDS)):
            self.now += calm.LOOK_SECONDS
            self.look()

    def look(self) -> None:
        calm._passed = (calm.monotonic(), self.now)

    def wait(self, waited: Any, timeout: float) -> bool:
        """A wait that comes to nothing: a stall first, in which its time passes, and what is left of it."""
        self.waits.append(round(timeout, 6))
        stall = self.stalls.pop(0) if self.stalls else 0.0
        self.now += stall
        self.look()
        self.run(max(0.0, timeout - stall))
        self.now += 1e-6  # as a wait is never shorter
        return False


def test_of_a_stall_a_tenth_of_a_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.run(1.0)
    assert calm.monotonic() == pytest.approx(1.0)
    machine.now += 3.0
    assert calm.monotonic() == pytest.approx(1.0 + calm.LONGEST)
    machine.look()
    machine.run(1.0)
    assert calm.monotonic() == pytest.approx(2.0 + calm.LONGEST)


def test_what_a_stall_took_of_a_wait_is_waited_for_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 3.0)
    assert not calm.wait(threading.Event(), 1.0)
    assert machine.waits == pytest.approx([1.0, 0.9], abs=1e-4)
    machine = Machine(monkeypatch, 3.0)
    calm.join(SimpleNamespace(is_alive=lambda: True), 1.0)
    assert machine.waits == pytest.approx([1.0, 0.9], abs=1e-4)


def test_a_wait_ends_with_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 3.0, 3.0)
    monkeypatch.setattr(calm, "_wait", lambda event, timeout: not machine.wait(event, timeout))
    assert calm.wait(threading.Event(), 1.0)
    assert machine.waits == [1.0]
    calm.join(SimpleNamespace(is_alive=lambda: False), 1.0)
    assert machine.waits == [1.0, 1.0]
