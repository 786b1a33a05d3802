"""Two threads that import the two targets of one patch at once: no deadlock, and always applied, once."""

from __future__ import annotations

import pytest

from tests.unit import interpreters
from tests.unit.support import PATCHED, STEP, WORK, Sandbox

# Each round is a fork of a process that has imported no target yet. A child that hangs is ended by its alarm, whose
# number is then what it "exits" with; the switch interval makes the threads change places as often as can be.
ROUNDS = """
    import os, signal, sys, threading
    {preload}
    sys.setswitchinterval(1e-6)

    def child():
        signal.alarm(100)
        barrier = threading.Barrier(2)
        def load(name):
            barrier.wait()
            __import__(name)
        names = ["fakeengine.scheduler", "fakeengine.worker"]
        threads = [threading.Thread(target=load, args=[name]) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        import fakeengine.scheduler, fakeengine.worker
        found = fakeengine.scheduler.Scheduler().step(7), fakeengine.worker.work(8)
        from _vllm_livepatch.sitecustomize import hook
        runtime = hook._made["runtime"][0]
        (state,) = runtime.patches.all
        runtime.reporter._greeting.say()  # as at an end that is not os._exit
        if found != (["patched", 7], ["patched", 8]) or state.state != "applied":
            print(found, state.described(), file=sys.stderr, flush=True)
            return 3
        return 0

    for number in range({rounds}):
        pid = os.fork()
        if not pid:
            code = 4
            try:
                code = child()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit("round %d: %s" % (number, os.waitstatus_to_exitcode(status)))
    print("all")
    """
PRELOAD = "import fakeengine, _vllm_livepatch.sitecustomize.hook"


@pytest.mark.parametrize(
    ("rounds", "preload"),
    [(500, PRELOAD), (480, f"{PRELOAD}, _vllm_livepatch.patches.around.wrappers"), (20, "")],
    ids=["runtime loaded", "patch loaded", "nothing loaded"],
)
def test_two_threads_import_two_targets_of_one_patch(sandbox: Sandbox, rounds: int, preload: str) -> None:
    sandbox.patch(targets=[STEP, WORK])
    sandbox.generate()
    done = sandbox.python(ROUNDS.format(rounds=rounds, preload=preload), LIVEPATCH_STATE_DIR=str(sandbox.state))
    assert (done.code, done.out) == (0, "all\n"), done.lines[-2:]
    assert len(done.lines) == rounds, "one line a process, and nothing else"


# What the process does while our lock is held, by the interpreter's own account of it.
WHILE_HELD = """
    import fakeengine, sys, threading, types
    import _vllm_livepatch.sitecustomize.patch_state as patch_state

    class Watched:
        def __init__(self):
            self.lock = threading.RLock()
        def __enter__(self):
            self.lock.acquire()
            held.append(threading.get_ident())
        def __exit__(self, *error):
            held.remove(threading.get_ident())
            self.lock.release()

    held, seen, taken = [], [], []
    def saw(event, arguments):
        if threading.get_ident() in held:
            taken.append(1)
            if event in ("import", "open", "compile", "exec", "os.listdir", "os.scandir", "marshal.loads"):
                seen.append((event, arguments[:1]))
    sys.addaudithook(saw)
    patch_state.threading = types.SimpleNamespace(RLock=Watched)
    import fakeengine.scheduler, fakeengine.worker
    print(fakeengine.scheduler.Scheduler().step(7), fakeengine.worker.work(8))
    from _vllm_livepatch.sitecustomize import hook
    made = hook._made["runtime"][0]
    assert type(made.patches.lock) is Watched
    print([state.state for state in made.patches.all], seen)
    """


def test_nothing_is_imported_or_read_while_our_lock_is_held(sandbox: Sandbox) -> None:
    """Who holds it and waits for a module's lock would be waited for by who imports that module and wants ours."""
    # Its source must be read to know that its module itself decorates it.
    sandbox.write(
        {
            "fakeengine/within.py": "def within(function):\n    return lambda item: function(item)\n",
            "fakeengine/worker.py": """\
                from fakeengine.within import within

                @within
                def work(item):
                    return [item]
                """,
        }
    )
    sandbox.patch(targets=[STEP, WORK])
    sandbox.generate()
    done = sandbox.python(WHILE_HELD)
    assert done.out == "['patched', 7] ['patched', 8]\n['applied'] []\n", done.err


@pytest.mark.parametrize("version", ["3.10", "3.11"])
@pytest.mark.parametrize("isolated", [True, False])
def test_an_interpreter_that_allows_no_daemon_threads(patched: Sandbox, version: str, isolated: bool) -> None:
    """A subinterpreter: neither the cache nor the report gets its thread, and the patch is applied.

    One that is not isolated allows daemon threads, and ends the process when it ends before them.
    """
    inner = "import fakeengine.scheduler as module; print(module.Scheduler().step(7), flush=True)"
    make = f"made = inner.create(isolated={isolated}); inner.run_string(made, {inner!r}); inner.destroy(made)"
    done = patched.python(f"import _xxsubinterpreters as inner; {make}", python=str(interpreters.find(version)))
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED, 1), done.err
    assert "; applied=around " in done.greeting
    assert done.greeting.endswith("; LIVEPATCH=off turns it off")
