"""LIVEPATCH=strict: what is wanted and not applied ends the process before it serves. And what is said, in every mode."""

from __future__ import annotations

import json
import time

import pytest
from vllm_livepatch.tools.in_bundle.status import is_missing

from tests.unit.support import PATCHED, PYTHON, STEP, STOCK, USE_STEP, WORK, Sandbox, finish

BROKEN = "def wrappers(livepatch):\n    raise RuntimeError('it broke')"
BEFORE = "print('before', flush=True)\n"
IMPORT = f"{BEFORE}import fakeengine.scheduler\nprint('the importer goes on')"


def edit(sandbox: Sandbox) -> None:
    """Somebody's edit of the target, on disk: code that was never verified."""
    file = sandbox.site / "fakeengine/scheduler.py"
    file.write_text(file.read_text("utf-8").replace("return [number]", "return [number + 0]"), "utf-8")


def fixed(sandbox: Sandbox) -> None:
    """The patch knows this code as one without the fault, and that it cannot be put on it."""
    code = sandbox.fingerprints(STEP)
    variants = [{"releases": ["1.0"], "code": code, "verdict": "fixed-upstream", "applies": False}]
    sandbox.patch(variant=variants)


def test_strict_is_as_auto_where_all_applies(patched: Sandbox) -> None:
    auto, strict = patched.python(USE_STEP), patched.python(USE_STEP, LIVEPATCH="strict")
    assert (strict.code, strict.out) == (auto.code, auto.out) == (0, PATCHED)
    assert [line.partition("pid")[0] for line in strict.lines] == [line.partition("pid")[0] for line in auto.lines]


ENDS = {
    "drifted": ("", "drifted", {}),
    "raises": (BROKEN, "raised", {}),
    "mismatch": ("def wrappers(livepatch): return {}", "mismatch", {}),
    "drifted, asked for": ("", "drifted", {"LIVEPATCH_AROUND": "on"}),
}


@pytest.mark.parametrize("how", list(ENDS))
def test_wanted_and_not_applied_ends_the_process(sandbox: Sandbox, how: str) -> None:
    code, reason, environ = ENDS[how]
    sandbox.patch(**({"code": code} if code else {}))
    sandbox.generate()
    if reason == "drifted":
        edit(sandbox)
    done = sandbox.python(IMPORT, LIVEPATCH="strict", **environ)
    assert (done.code, done.out) == (78, "before\n")
    greeting, line = done.lines
    assert "LIVEPATCH=off turns it off" in greeting
    assert line.startswith(f"vllm-livepatch: LIVEPATCH=strict: around is not applied ({reason}): ")
    # The same under auto is one line, and the importer goes on.
    done = sandbox.python(IMPORT, **environ)
    assert (done.code, done.out) == (0, "before\nthe importer goes on\n")
    assert done.lines[1:] == [line.replace("LIVEPATCH=strict: ", "")]


@pytest.mark.parametrize("toggle", ["on", "force"])
@pytest.mark.parametrize("what", ["fixed-upstream", "not-present"])
def test_asked_for_and_already_fixed_is_satisfied(sandbox: Sandbox, what: str, toggle: str) -> None:
    """Strict ends a process only for a fault that is there and not mended."""
    sandbox.patch()
    if what == "fixed-upstream":
        fixed(sandbox)
    else:
        sandbox.patch(variant=[{"releases": ["1.0"], "verdict": "not-present", "code": {}}])
        sandbox.write({"fakeengine/scheduler.py": "class Other: pass\n"})
    sandbox.generate()
    done = sandbox.python(IMPORT, LIVEPATCH="strict", LIVEPATCH_AROUND=toggle)
    assert (done.code, done.out, done.others) == (0, "before\nthe importer goes on\n", [])
    assert " skipped=1 failed=- " in done.greeting
    assert (sandbox.reported()["state"], sandbox.reported()["reason"]) == ("skipped", what)
    assert finish([PYTHON, sandbox.bundle, "check"], sandbox.environ(LIVEPATCH_AROUND=toggle)).code == 0


@pytest.mark.parametrize(("newest", "ends"), [("fixed-upstream", False), ("not-present", False), ("needed", True)])
def test_a_nightly_is_as_the_newest_listed_release_before_it(sandbox: Sandbox, newest: str, ends: bool) -> None:
    code = sandbox.fingerprints(STEP)
    last = {"releases": ["1.1"], "code": {STEP: "f" * 16}, "verdict": newest}
    sandbox.patch(variant=[{"releases": ["1.0"], "code": code}, last])
    sandbox.generate()
    edit(sandbox)
    sandbox.write({"fakeengine/_version.py": '__version__ = "1.2.dev5+g1234567"\n'})
    done = sandbox.python(IMPORT, LIVEPATCH="strict")
    assert done.code == (78 if ends else 0)
    unknown = f"fakeengine 1.2.dev5+g1234567 has code that was never verified: {STEP}"
    skipped = f"vllm-livepatch: around: {unknown}; the newest listed release before it does not need this patch, "
    failed = f"vllm-livepatch: LIVEPATCH=strict: around is not applied (drifted): {unknown}"
    (line,) = done.others
    assert line == (failed if ends else f"{skipped}LIVEPATCH_AROUND=on asks for it")
    assert finish([PYTHON, sandbox.bundle, "check"], sandbox.environ()).code == int(ends)
    assert sandbox.python(IMPORT, LIVEPATCH="strict", LIVEPATCH_AROUND="on").code == 78
    if not ends:
        (reported,) = [one["patches"][0] for one in sandbox.reports() if one["patches"][0]["reason"] == "unneeded"]
        assert (reported["state"], reported["verdict"]) == ("skipped", "drifted")
        assert not is_missing(reported)


def test_all_that_is_not_applied_is_named_at_one_start(sandbox: Sandbox) -> None:
    """Also what this start would have come to later, and what breaks as it is put in place."""
    sandbox.patch("a-broken", code=BROKEN)
    sandbox.patch("another", code=BROKEN)
    sandbox.patch("fine")
    sandbox.patch("later", [WORK])
    sandbox.patch("nobody-asked", [WORK], auto="off")
    sandbox.generate()
    raised = "is not applied (raised): RuntimeError while applying: it broke"
    drifted = f"is not applied (drifted): fakeengine 1.0 has code that was never verified: {STEP}"
    done = sandbox.python(IMPORT, LIVEPATCH="strict")
    head = "vllm-livepatch: LIVEPATCH=strict: "
    assert (done.code, done.others) == (78, [f"{head}a-broken {raised}", f"{head}another {raised}"])
    edit(sandbox)
    done = sandbox.python(IMPORT, LIVEPATCH="strict", LIVEPATCH_ANOTHER="off")
    assert (done.code, done.out) == (78, "before\n")
    assert done.others == [f"{head}{name} {drifted}" for name in ("a-broken", "fine")]
    worker = sandbox.site / "fakeengine/worker.py"
    worker.write_text(worker.read_text("utf-8").replace("[item]", "[item, 0]"), "utf-8")
    done = sandbox.python(IMPORT, LIVEPATCH="strict", LIVEPATCH_FINE="odd", LIVEPATCH_ANOTHER="off")
    names = [line.removeprefix(head).split()[0].partition("=")[0] for line in done.others]
    assert (done.code, names) == (78, ["LIVEPATCH_FINE", "a-broken", "fine", "later"])
    assert "failed=a-broken,fine,later" in done.greeting


@pytest.mark.parametrize(
    "environ",
    [{}, {"LIVEPATCH_AROUND": "off"}, {"LIVEPATCH_AROUND": "force"}, {"LIVEPATCH_AROUND": "auto"}],
    ids=lambda environ: "".join(environ.values()) or "unset",
)
def test_unwanted_or_forced_ends_nothing(sandbox: Sandbox, environ: dict[str, str]) -> None:
    sandbox.patch()
    if environ == {"LIVEPATCH_AROUND": "off"} or environ == {"LIVEPATCH_AROUND": "force"}:
        edit(sandbox)
    else:  # the release does not have the target, as is known of it
        sandbox.patch(variant=[{"releases": ["1.0"], "verdict": "not-present", "code": {}}])
        sandbox.write({"fakeengine/scheduler.py": "class Other: pass\n"})
    sandbox.generate()
    done = sandbox.python(IMPORT, LIVEPATCH="strict", **environ)
    assert (done.code, done.out) == (0, "before\nthe importer goes on\n")


def test_in_a_thread_and_in_a_try_it_ends_all_the_same(sandbox: Sandbox) -> None:
    sandbox.patch(code=BROKEN)
    sandbox.generate()
    done = sandbox.python(
        """
        import atexit, threading
        atexit.register(print, "no exit handler of a process that serves is run")
        def load():
            try:
                import fakeengine.scheduler
            except BaseException:
                print("caught")
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        print("went on")
        """,
        LIVEPATCH="strict",
    )
    assert (done.code, done.out) == (78, "")


def test_a_patch_that_was_applied_and_is_overtaken_ends_nothing(patched: Sandbox) -> None:
    done = patched.python(f"{USE_STEP}; Scheduler.step = None", LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED)
    assert "no longer applied (overwritten)" in done.lines[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIVEPATCH_AROUND", "perhaps"),
        ("LIVEPATCH_AROUND_LIMIT", "many"),
        ("FIELD_LIMIT", "-1"),
        ("FIELD_SWITCH", "perhaps"),
    ],
)
def test_a_bad_value_ends_the_process_under_strict_and_is_logged_under_auto(
    sandbox: Sandbox, name: str, value: str
) -> None:
    option = {"name": "limit", "default": 5, "minimum": 1, "aliases": ["FIELD_LIMIT"]}
    sandbox.patch(option=[option], aliases=["FIELD_SWITCH"])
    sandbox.generate()
    done = sandbox.python(IMPORT, LIVEPATCH="strict", **{name: value})
    assert (done.code, done.out) == (78, "before\n")
    _, line = done.lines
    assert line.startswith(f"vllm-livepatch: LIVEPATCH=strict: {name}={value!r} is ")
    done = sandbox.python(USE_STEP, **{name: value})
    assert (done.code, done.out) == (0, PATCHED)
    assert done.lines[1:] == [line.replace("LIVEPATCH=strict: ", "")]


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_mode_counts_as_unset(patched: Sandbox, value: str) -> None:
    done = patched.python(USE_STEP, LIVEPATCH=value, LIVEPATCH_AROUND=value, LIVEPATCH_LOG=value)
    assert (done.code, done.out, done.others) == (0, PATCHED, [])


@pytest.mark.parametrize("value", ["stritc", "force", "nonsense"])
def test_a_bad_mode_counts_as_off_and_is_reported(patched: Sandbox, value: str) -> None:
    done = patched.python(USE_STEP, LIVEPATCH=value)
    assert (done.code, done.out) == (0, STOCK)
    assert done.lines[1:] == [f"vllm-livepatch: LIVEPATCH={value!r} is none of auto, off, strict; it counts as off"]
    (entry,) = patched.report()["patches"]
    assert (entry["state"], entry["reason"]) == ("skipped", "off")


def test_in_a_bad_mode_nothing_is_armed(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.patch("later", [WORK])
    sandbox.generate()
    done = sandbox.python(USE_STEP, LIVEPATCH="nonsense")
    assert "; applied=- armed=0 skipped=2 failed=- " in done.greeting
    found = [(patch["state"], patch["reason"]) for patch in sandbox.report()["patches"]]
    assert found == [("skipped", "off")] * 2
    done = sandbox.python("import fakeengine.scheduler, fakeengine.worker", LIVEPATCH="nonsense")
    assert " armed=0 skipped=2 " in done.greeting


@pytest.mark.parametrize("value", ["OFF", "0", "False", "no", "disabled "])
def test_off_in_all_its_words_leaves_no_trace(patched: Sandbox, value: str) -> None:
    done = patched.python(USE_STEP, LIVEPATCH=value)
    assert (done.code, done.out, done.lines) == (0, STOCK, [])
    assert not list(patched.state.glob("*"))


@pytest.mark.parametrize("value", ["ON", "1", "True", "yes", "enabled", "Auto"])
def test_on_in_all_its_words(patched: Sandbox, value: str) -> None:
    assert patched.python(USE_STEP, LIVEPATCH=value).out == PATCHED


def test_strict_in_any_case(sandbox: Sandbox) -> None:
    sandbox.patch(code=BROKEN)
    sandbox.generate()
    assert sandbox.python(IMPORT, LIVEPATCH="Strict ").code == 78


def test_a_name_that_nothing_knows_ends_the_process_under_strict(patched: Sandbox) -> None:
    slip = {"LIVEPATCH_AROUDN": "off"}
    done = patched.python(IMPORT, LIVEPATCH="strict", **slip)
    assert (done.code, done.out) == (78, "before\n")
    assert (
        done.lines[1]
        == "vllm-livepatch: LIVEPATCH=strict: LIVEPATCH_AROUDN is unknown, and nothing reads it; did you mean LIVEPATCH_AROUND?"
    )
    done = patched.python(USE_STEP, **slip)
    assert (done.code, done.out) == (0, PATCHED)
    assert done.lines[1:] == [
        "vllm-livepatch: LIVEPATCH_AROUDN is unknown, and nothing reads it; did you mean LIVEPATCH_AROUND?"
    ]


def test_lines_for_a_log_store(sandbox: Sandbox) -> None:
    sandbox.patch(code=BROKEN)
    sandbox.generate()
    before = time.time()
    done = sandbox.python(USE_STEP, LIVEPATCH_LOG="JSON")
    assert (done.code, done.out) == (0, STOCK)
    entries = [json.loads(line) for line in done.lines]
    assert [(entry["logger"], entry["pid"]) for entry in entries] == [("vllm-livepatch", sandbox.report()["pid"])] * 2
    assert "LIVEPATCH=off turns it off" in entries[0]["message"]
    assert entries[1]["message"].startswith("around is not applied (raised): ")
    assert all(before - 0.001 < entry["time"] < time.time() + 0.001 for entry in entries)


# Promise 5: nothing on stdout, ever; on stderr one line a process, and one for each patch that is wanted and not applied.


def test_one_line_a_process_and_one_for_each_wanted_and_unapplied_patch(sandbox: Sandbox) -> None:
    sandbox.patch("applies")
    sandbox.patch("applies-too", [WORK])
    sandbox.patch("breaks", code=BROKEN)
    sandbox.patch("is-off", code=BROKEN)
    sandbox.patch(
        "has-drifted", [STEP, WORK], variant=[{"releases": ["1.0"], "code": {STEP: "0" * 16, WORK: "1" * 16}}]
    )
    absent = [{"releases": ["1.0"], "verdict": "not-present", "code": {}}]
    sandbox.patch("is-not-there", ["fakeengine.scheduler:Other.step"], variant=absent)
    sandbox.patch("nobody-asked", auto="off")
    sandbox.generate()
    code = "import fakeengine.scheduler, importlib, fakeengine.worker\nfor _ in range(3): importlib.reload(fakeengine.worker)"
    done = sandbox.python(code, LIVEPATCH_IS_OFF="off")
    assert (done.code, done.out) == (0, "")
    assert all(line.startswith("vllm-livepatch: ") for line in done.lines)
    (greeting, *rest) = done.lines
    assert greeting.split(", ")[0] == f"vllm-livepatch: {greeting.split()[1].rstrip(',')}"
    came = "applied=applies,applies-too armed=0 skipped=3 failed=breaks,has-drifted"
    assert f", pid {sandbox.report()['pid']}, fakeengine 1.0; {came} bundle=" in greeting
    assert [line.split(":")[1].split("(")[0].strip() for line in rest] == [
        "has-drifted is not applied",
        "breaks is not applied",
    ]
    states = {patch["name"]: (patch["state"], patch["reason"]) for patch in sandbox.report()["patches"]}
    assert states == {
        "applies": ("applied", None),
        "applies-too": ("applied", None),
        "breaks": ("failed", "raised"),
        "is-off": ("skipped", "off"),
        "has-drifted": ("skipped", "drifted"),
        "is-not-there": ("skipped", "not-present"),
        "nobody-asked": ("skipped", "optional"),
    }
    for patch in sandbox.report()["patches"]:
        if patch["state"] in ("skipped", "failed"):
            assert len(patch["reason"].split()) == 1
            assert len(patch["detail"].split()) > 3


def test_force_is_logged_loudly_and_recorded(patched: Sandbox) -> None:
    edit(patched)
    done = patched.python(USE_STEP, LIVEPATCH_AROUND="force")
    assert done.out == PATCHED
    assert done.lines[1].startswith("vllm-livepatch: around: forced onto code that was never verified: ")
    reported = patched.reported()
    assert (reported["state"], reported["reason"], reported["verdict"]) == ("applied", "forced", "drifted")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("1.0", "needed"),
        ("1.0+rocm700", "needed"),
        ("0.23.1rc1.dev424+g3f5a1e173", "unverified"),
        ("1.0.post1", "unverified"),
        (None, "unverified"),
    ],
)
def test_releases_as_people_build_them(patched: Sandbox, version: str | None, verdict: str) -> None:
    file = patched.site / "fakeengine/_version.py"
    if version is None:
        file.unlink()
    else:
        file.write_text(f"version: str = {version!r}\n__version__ = version_tuple = None\n", "utf-8")
    done = patched.python(USE_STEP)
    assert done.out == PATCHED
    assert (patched.reported()["state"], patched.reported()["verdict"]) == ("applied", verdict)
    assert patched.report()["packages"] == {"fakeengine": version}
    if verdict == "unverified":  # applies, and says so
        assert patched.reported()["reason"] == "unverified"
        assert "is not listed" in done.lines[1]
    else:
        assert len(done.lines) == 1
