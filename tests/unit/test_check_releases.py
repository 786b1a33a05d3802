"""`check` for what was published: verdicts, what drifted, and one line for all that goes wrong."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import cache, installed
from vllm_livepatch.tools.compatibility import check as checking
from vllm_livepatch.tools.compatibility import drift
from vllm_livepatch.tools.releases import registry, sources

from tests.unit.local_index import LocalIndex, make_wheel, serving
from tests.unit.support import PYTHON, STEP, Cli, Done, Sandbox

NAME = "fakeengine-1.0-py3-none-any.whl"
NEXT = "fakeengine-1.1-py3-none-any.whl"
OTHER = "fakeengine-1.2.dev3+rocm700-py3-none-any.whl"


@pytest.fixture
def index(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalIndex]:
    """Releases 1.0, for which there is a patch; 1.1 of other code; a nightly of the same code for ROCm."""
    sandbox.patch()
    files = {
        file.relative_to(sandbox.site).as_posix(): file.read_bytes() + b"\nraise SystemExit('executed')\n"
        for file in sandbox.site.rglob("*.py")
    }
    drifted = files["fakeengine/scheduler.py"].replace(b"[number]", b"[number + 1]")
    with serving(LocalIndex()) as index:
        index.add("fakeengine", NAME, make_wheel("fakeengine", "1.0", files))
        index.add("fakeengine", NEXT, make_wheel("fakeengine", "1.1", {**files, "fakeengine/scheduler.py": drifted}))
        index.add("fakeengine", OTHER, make_wheel("fakeengine", "1.2.dev3+rocm700", files))
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(sources, "DIRECTORY_GUESS", 4096)
        monkeypatch.setattr(registry, "all_pins", lambda package: ())
        yield index


def check(cli: Cli, sandbox: Sandbox, *arguments: str) -> Done:
    return cli("check", "--patch-dir", str(sandbox.patches), *arguments)


def verdict(done: Done) -> tuple[dict[str, str], str]:
    """The packages, and the verdict of the only patch that is for them."""
    answer = json.loads(done.out)
    (around,) = answer["patches"]
    assert around["name"] == "around"
    return answer["packages"], around["verdict"]


@pytest.mark.parametrize(
    ("asked", "found", "expected", "code"),
    [
        ("fakeengine==1.0", "1.0", "needed", 0),
        ("fakeengine==1", "1.0", "needed", 0),
        ("FakeEngine", "1.1", "drifted", 1),
        ("fakeengine==1.0+rocm700", "1.0+rocm700", "needed", 0),
        ("fakeengine==1.2.dev3+rocm700", "1.2.dev3+rocm700", "unverified", 0),
        ("fakeengine==1.2.dev3", "1.2.dev3+rocm700", "unverified", 0),
    ],
)
def test_a_release(
    index: LocalIndex, sandbox: Sandbox, cli: Cli, asked: str, found: str, expected: str, code: int
) -> None:
    done = check(cli, sandbox, "--release", asked, "--json")
    assert verdict(done) == ({"fakeengine": found}, expected)
    assert done.code == code


def test_a_version_alone_is_of_the_package_that_all_patches_are_for(
    index: LocalIndex, sandbox: Sandbox, cli: Cli, tmp_path: Path
) -> None:
    """As for `lock` and `from-diff`."""
    assert verdict(check(cli, sandbox, "--only", "--release", "1.0", "--json")) == ({"fakeengine": "1.0"}, "needed")
    done = check(cli, sandbox, "--release", "1.0")
    assert (done.code, "--release 1.0 is of fakeengine or lmcache or vllm: --release vllm==1.0" in done.err) == (
        2,
        True,
    )
    done = cli("new", "mine", "--target", STEP, "--release", "1.1", "--out", str(tmp_path / "mine"))
    assert (done.code, (tmp_path / "mine/mine/wrappers.py").is_file()) == (0, True), done


def test_a_release_of_another_index(
    index: LocalIndex, sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    done = check(cli, sandbox, "--index-url", index.url, "--release", "fakeengine==1.0", "--json")
    assert verdict(done) == ({"fakeengine": "1.0"}, "needed")


def test_a_wheel(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    file = sandbox.root / NEXT
    file.write_bytes(index.files["fakeengine"][NEXT])
    done = check(cli, sandbox, "--wheel", str(file), "--json", "--no-diff")
    assert verdict(done) == ({"fakeengine": "1.1"}, "drifted")
    assert index.requests == 0


def test_a_release_beside_what_is_installed(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    """The packages that are named are those of the registry, the others the installed ones."""
    answer = json.loads(
        check(
            cli, sandbox, "--site-packages", str(sandbox.site), "--release", "fakeengine==1.1", "--json", "--no-diff"
        ).out
    )
    assert answer["packages"] == {"fakeengine": "1.1"}
    assert len(answer["patches"]) > 1
    done = check(cli, sandbox, "--python", PYTHON, "--release", "fakeengine==1.0", "--json")
    assert json.loads(done.out)["packages"] == {"fakeengine": "1.0"}


@pytest.mark.parametrize("rocm", [True, False])
def test_a_patch_for_rocm(index: LocalIndex, sandbox: Sandbox, cli: Cli, rocm: bool) -> None:
    sandbox.patch(auto="rocm")
    asked = "fakeengine==1.0+rocm700" if rocm else "fakeengine==1.0"
    (around,) = json.loads(check(cli, sandbox, "--release", asked, "--json").out)["patches"]
    assert around["reason"] == ("needed" if rocm else "optional")


# What drifted


def test_what_drifted_is_shown(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    done = check(cli, sandbox, "--release", "fakeengine==1.1", "--json")
    drift = json.loads(done.out)["patches"][0]["drift"]
    assert drift["nearest"] == {"release": "1.0", "releases": ["1.0"]}
    assert drift["variants"] == [{"releases": ["1.0"], "verdict": "needed", "differs": [STEP]}]
    (change,) = drift["changes"]
    assert change["target"] == STEP
    assert change["diff"].splitlines() == [
        f"--- fakeengine 1.0 {STEP}",
        f"+++ fakeengine 1.1 {STEP}",
        "@@ -1,2 +1,2 @@",
        "     def step(self, number):",
        "-        return [number]",
        "+        return [number + 1]",
    ]
    page = check(cli, sandbox, "--release", "fakeengine==1.1").out
    lines = page.splitlines()
    at = lines.index(f"1. {STEP}")
    assert lines[at + 1 :] == [
        "   differs from fakeengine 1.0",
        *change["diff"].splitlines()[2:],
        "   stops, needed there: around",
    ]
    assert "\x1b" not in page
    assert [line.split() for line in lines if line.startswith("around")] == [["around", "drifted", "no", "see", "1"]]


def test_each_change_is_shown_once_with_all_that_it_stops(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    free = "fakeengine.scheduler:Scheduler.free"
    fixed = [{"releases": ["1.0"], "verdict": "fixed-upstream", "code": sandbox.fingerprints(STEP)}]
    sandbox.patch("another", variant=fixed)
    sandbox.patch("third", calls=[free], variant=[{"releases": ["1.0"], "code": sandbox.fingerprints(STEP, free)}])
    text = (sandbox.site / "fakeengine/scheduler.py").read_text()
    changed = text.replace(
        "    def step(self, number):\n", '    def step(self, number):\n        """New."""\n        # new\n\n'
    )
    assert changed != text
    gone = changed.replace("[number]", "[number + 1]  # more").replace("def free", "def freed")
    files = {"fakeengine/__init__.py": b"", "fakeengine/scheduler.py": gone.encode()}
    index.add("fakeengine", "fakeengine-1.3-py3-none-any.whl", make_wheel("fakeengine", "1.3", files))
    page = check(cli, sandbox, "--release", "fakeengine==1.3").out
    assert page.count("+        return [number + 1]") == 1
    assert "new" not in page.lower()
    assert "# more" not in page
    assert "   stops, needed there: around, third" in page
    assert "   stops, not needed there: another" in page
    assert (
        "2. fakeengine.scheduler\n   has no Scheduler.free; fakeengine 1.0 has\n   stops, needed there: third" in page
    )
    assert "verified variant" not in page
    assert "verified variant" in check(cli, sandbox, "--release", "fakeengine==1.3", "--verbose").out
    json_page = json.loads(check(cli, sandbox, "--release", "fakeengine==1.3", "--json").out)
    assert "distributions" not in json_page


def test_a_distribution_of_another_name_is_named(sandbox: Sandbox, cli: Cli) -> None:
    """As vendors' builds of vLLM are."""
    sandbox.patch()
    info = "fakeengine_tpu-1.0.dist-info"
    sandbox.write({f"{info}/METADATA": "Metadata-Version: 2.1\nName: fakeengine-tpu\nVersion: 1.0\n"})
    sandbox.write({f"{info}/RECORD": "fakeengine/__init__.py,,\n"})
    done = check(cli, sandbox, "--site-packages", str(sandbox.site))
    assert done.out.splitlines()[0] == "checked: fakeengine-tpu 1.0"
    done = check(cli, sandbox, "--site-packages", str(sandbox.site), "--json")
    answer = json.loads(done.out)
    assert (answer["packages"], answer["distributions"]) == ({"fakeengine": "1.0"}, {"fakeengine": "fakeengine-tpu"})


def test_what_drifted_is_coloured_in_a_terminal(
    index: LocalIndex, sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    page = check(cli, sandbox, "--release", "fakeengine==1.1").out
    assert "\x1b[31m-        return [number]" in page
    assert "\x1b[32m+        return [number + 1]" in page


def test_the_nearest_variant_is_the_one_that_differs_least(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    free = "fakeengine.scheduler:Scheduler.free"
    prints = sandbox.fingerprints(STEP, free)
    nothing = {STEP: "0" * 16, free: "0" * 16}
    sandbox.patch(
        calls=[free],
        variant=[{"releases": ["1.1.1"], "code": nothing}, {"releases": ["0.9", "1.0"], "code": prints}],
    )
    drift = json.loads(check(cli, sandbox, "--release", "fakeengine==1.1", "--json").out)["patches"][0]["drift"]
    assert drift["nearest"] == {"release": "1.0", "releases": ["0.9", "1.0"]}
    assert [variant["differs"] for variant in drift["variants"]] == [[STEP, free], [STEP]]


def test_what_drifted_cannot_be_fetched(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    index.files["fakeengine"].pop(NAME)
    done = check(cli, sandbox, "--release", "fakeengine==1.1")
    assert done.code == 1
    assert "its code cannot be shown: fakeengine 1.0 is not in the registry; the newest there is 1.1" in done.out
    assert STEP in done.out


def test_the_registry_is_not_asked_for_somebodys_own_package(index: LocalIndex, sandbox: Sandbox, cli: Cli) -> None:
    sandbox.write({"fakeengine/scheduler.py": "class Scheduler:\n    def step(self): return 1\n"})
    done = check(cli, sandbox, "--site-packages", str(sandbox.site))
    assert (done.code, index.requests) == (1, 0)
    assert "fakeengine is nothing that the registry is asked for" in done.out


# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--release", "fakeengine>=1.0"], "--release takes PACKAGE==VERSION"),
        (["--release", "fakeengine==1.*"], "--release takes PACKAGE==VERSION"),
        (["--release", "=="], "--release takes PACKAGE==VERSION"),
        (["--release", "fakeengine==9.9"], "fakeengine 9.9 is not in the registry; the newest there is 1.1"),
        (["--release", "unknown==1.0"], "the registry has no package named unknown"),
        (["--release", "other==1.0"], "no patch is for other; there are some for fakeengine"),
        (["--release", "fakeengine==1.0", "--release", "fakeengine==1.1"], "name one release of fakeengine"),
        (["--wheel", "nothing.txt"], "nothing.txt is not named as a wheel is"),
        (["--wheel", NAME], "cannot be read: No such file"),
    ],
)
def test_bad_input(
    index: LocalIndex, sandbox: Sandbox, cli: Cli, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("other", "other-1.0-py3-none-any.whl", make_wheel("other", "1.0", {"other/__init__.py": b""}))
    done = check(cli, sandbox, *arguments)
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert message in done.err


@pytest.mark.parametrize("fault", ["damaged", "cut short", "refused", "no index"])
def test_a_registry_that_fails(index: LocalIndex, sandbox: Sandbox, cli: Cli, fault: str) -> None:
    if fault == "damaged":
        content = index.files["fakeengine"][NAME]
        index.add("fakeengine", NAME, content[: len(content) // 2])
    index.cut_short = fault == "cut short"
    index.status = 403 if fault == "refused" else None
    index.content_type = "image/png" if fault == "no index" else "text/html"
    done = check(cli, sandbox, "--release", "fakeengine==1.0")
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert "secret" not in done.err
    index.cut_short, index.status, index.content_type = False, None, "text/html"
    if fault != "damaged":  # and the cache is as good as new
        assert verdict(check(cli, sandbox, "--release", "fakeengine==1.0", "--json"))[1] == "needed"


@pytest.mark.parametrize("fault", ["yanked", "no ranges", "full disk"])
def test_what_is_printed_and_does_not_stop_a_check(
    index: LocalIndex, sandbox: Sandbox, cli: Cli, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "yanked":
        index.yanked.add(NAME)
    if fault == "full disk":
        monkeypatch.setattr(cache, "replace", lambda path, data: False)
    index.ignore_ranges = fault == "no ranges"
    done = check(cli, sandbox, "--release", "fakeengine==1.0", "--json")
    assert verdict(done) == ({"fakeengine": "1.0"}, "needed")
    messages = {"yanked": "was yanked: broken", "no ranges": "is read whole", "full disk": "nothing is kept there"}
    assert messages[fault] in done.err
    assert done.code == 0


def test_an_interpreter_is_asked_with_everything_off(tmp_path: Path) -> None:
    """What is installed there is asked of the interpreter as it came, also where a bundle is on its path."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf \'[["%s"], {}, [3, 11]]\' "$LIVEPATCH"\n')
    python.chmod(0o755)
    assert checking.interpreter_tree(str(python), ["vllm"]).path == ["off"]


@pytest.mark.parametrize(
    ("name", "before", "after", "shown"),
    [
        (
            "f",
            'def f(): "d"; return 1\n',
            'def f(): "d"; return 2\n',
            ['-def f(): "d"; return 1', '+def f(): "d"; return 2'],
        ),
        (
            "E",
            "class E(ValueError): x = 1\n",
            'class E(RuntimeError): """doc"""\n',
            ['+class E(RuntimeError): """doc"""'],
        ),
        (
            "f",
            'def f():\n    """d\n    e"""; lock.acquire()\n    return 1\n',
            'def f():\n    """d\n    e"""; lock.release()\n    return 2\n',
            ['-    e"""; lock.acquire()', "-    return 1", '+    e"""; lock.release()', "+    return 2"],
        ),
        (
            "f",
            "def f():\n    x = '''a\n\nb'''\n    return 1\n",
            "def f():\n    x = '''a\nb'''\n    return 2\n",
            ["-", "-    return 1", "+    return 2"],
        ),
        (
            "f",
            "def f():\n    return 1  # one\n",
            "def f():\n    # two\n    return 2\n",
            ["-    return 1", "+    return 2"],
        ),
    ],
)
def test_no_difference_is_hidden(name: str, before: str, after: str, shown: list[str], tmp_path: Path) -> None:
    trees = []
    for number, text in enumerate((before, after)):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "engine.py").write_text(text)
        trees.append(installed.Tree([str(place)]))
    lines = [drift.definition(tree, f"engine:{name}") for tree in trees]
    assert None not in lines
    found = list(difflib.unified_diff(lines[0] or [], lines[1] or [], lineterm="", n=0))
    assert [line for line in found[2:] if not line.startswith("@@")][-len(shown) :] == shown
    assert drift.definition(trees[0], "engine:other") is None
