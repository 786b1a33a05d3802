"""What a patch calls and does not wrap is replaced in memory by another program: the patch is not applied, or no longer."""

from __future__ import annotations

import pytest

from tests.unit.support import PATCHED, STEP, USE_STEP, WORK, Done, Sandbox

FREE = "fakeengine.scheduler:Scheduler.free"
REPLACED = """
import fakeengine.scheduler as module
ours = module.Scheduler
{code}
import fakeengine.worker  # the next look
print(module.Scheduler().step(7))
"""


def said(sandbox: Sandbox, done: Done) -> str:
    """The detail, in the report and on stderr; which thread looks first, that of the import or the report's, is open."""
    reported = sandbox.reported()
    assert (reported["state"], reported["reason"]) == ("failed", "relied-on")
    detail = reported["detail"]
    lines = [f"vllm-livepatch: around is {word} applied (relied-on): {detail}" for word in ("not", "no longer")]
    assert len([line for line in done.others if line in lines]) == 1, done.err
    return str(detail)


THEIRS = "def theirs(self): return 'theirs'\nours.free = theirs"


@pytest.fixture
def relying(sandbox: Sandbox) -> Sandbox:
    """A patch of `step` that calls `free`, and another that makes the runtime look again."""
    sandbox.patch(calls=[FREE])
    sandbox.patch("other", [WORK])
    sandbox.generate()
    return sandbox


def test_replaced_before_the_patch_comes(relying: Sandbox) -> None:
    """The patch waits for its second target."""
    relying.patch(targets=[STEP, WORK], calls=[FREE])
    relying.generate()
    code = REPLACED.format(code=THEIRS)
    done = relying.python(code)
    assert done.out == "[7]\n"
    detail = said(relying, done)
    assert detail.startswith(f"{FREE}, which it relies on, was replaced by __main__.theirs")
    strict = relying.python(code, LIVEPATCH="strict")
    assert (strict.code, strict.out) == (78, "")


def test_replaced_before_the_next_target_is_imported(relying: Sandbox) -> None:
    done = relying.python(REPLACED.format(code=THEIRS))
    assert done.out == "[7]\n"
    assert relying.reported("other")["state"] == "applied"
    assert "which it relies on" in said(relying, done)
    strict = relying.python(REPLACED.format(code=THEIRS), LIVEPATCH="strict")
    assert (strict.code, strict.out) == (78, "")


def test_replaced_while_it_serves(relying: Sandbox) -> None:
    """The patch stands down in the thread that calls it next; what it holds is given back there."""
    code = """\
        import threading
        def wrappers(livepatch):
            def put_back(): print("put back by", threading.current_thread().name, flush=True)
            livepatch.on_stand_aside(put_back)
            def around(wrapped, instance, args, kwargs):
                livepatch.count("calls")
                return ["patched", *wrapped(*args, **kwargs)]
            return dict.fromkeys(TARGETS, around)
        """
    relying.patch(code=code, calls=[FREE])
    relying.generate()
    done = relying.python("""
        import sys, time
        from fakeengine.scheduler import Scheduler
        print(Scheduler().step(7), flush=True)
        def theirs(self): return "theirs"
        Scheduler.free = theirs
        deadline = time.monotonic() + 30
        while (found := Scheduler().step(7)) == ["patched", 7] and time.monotonic() < deadline:
            time.sleep(0.02)
        print(found, Scheduler().step(8))
        """)
    assert done.out == f"{PATCHED}put back by MainThread\n[7] [8]\n", done.err
    assert (relying.reported()["state"], relying.reported()["reason"]) == ("failed", "relied-on")
    assert done.code == 0
    assert any(line.startswith("vllm-livepatch: around is no longer applied (relied-on): ") for line in done.lines)


FINE = {
    "wrapped": "import functools\n@functools.wraps(ours.free)\ndef f(self, g=ours.free): return g(self)\nours.free = f",
    "wrapped without a word": "def made(g):\n    return lambda self: g(self)\nours.free = made(ours.free)",
    "a class below that inherits": "class Own(ours): pass\nmodule.Scheduler = Own",
    "a class below that calls it": "class Own(ours):\n    def free(self): return super().free()\nmodule.Scheduler = Own",
    "loaded again": "import importlib\nimportlib.reload(module)",
}


@pytest.mark.parametrize("code", FINE.values(), ids=FINE)
def test_what_still_calls_it_is_fine(relying: Sandbox, code: str) -> None:
    done = relying.python(REPLACED.format(code=code))
    assert (done.out, done.others) == (PATCHED, []), done.err
    assert relying.reported()["state"] == "applied"


LOST = {
    "a class below that does not": "class Own(ours):\n    def free(self): return 'own'\nmodule.Scheduler = Own",
    "another method of its own": "ours.free = ours.other",
}


@pytest.mark.parametrize("code", LOST.values(), ids=LOST)
def test_what_does_not_is_not(relying: Sandbox, code: str) -> None:
    text = (relying.site / "fakeengine/scheduler.py").read_text("utf-8")
    relying.write({"fakeengine/scheduler.py": f"{text}\n    def other(self): return 'other'\n"})
    done = relying.python(REPLACED.format(code=code))
    assert "which it relies on" in said(relying, done)


def test_another_patchs_wrapper_is_none_of_it(sandbox: Sandbox) -> None:
    """Each relies on what the other wraps, and a third wraps one of them later."""
    sandbox.patch("first", [STEP], calls=[FREE])
    sandbox.patch("second", [FREE], calls=[STEP])
    sandbox.patch("third", [FREE, WORK])
    sandbox.generate()
    done = sandbox.python(f"{USE_STEP}\nimport fakeengine.worker")
    assert {sandbox.reported(name)["state"] for name in ("first", "second", "third")} == {"applied"}, done.err


@pytest.mark.parametrize(
    "own",
    ["free = property(lambda self: 1)", "free = staticmethod(len)", "from os.path import join as free", "free = 3"],
)
def test_what_the_file_itself_has_from_elsewhere(sandbox: Sandbox, own: str) -> None:
    sandbox.write(
        {"fakeengine/scheduler.py": f"class Scheduler:\n    def step(self, number): return [number]\n    {own}\n"}
    )
    sandbox.patch(calls=[FREE])
    sandbox.generate()
    assert sandbox.python(USE_STEP).out == PATCHED
    assert sandbox.reported()["state"] == "applied"
