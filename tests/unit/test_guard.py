"""The distribution `vllm-livepatch-guard`: written, installed, and what it says of a process. vLLM runs it in tests/releases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import settings, vllm_plugin
from vllm_livepatch.tools.bundles import bundle, catalogue, placing

from tests.unit.support import DEADLINE, PATCHED, PYTHON, STOCK, USE_STEP, Cli, Done, Sandbox, finish

RUN = """\
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="vllm.general_plugins")
    assert plugin.name == "livepatch", plugin
    plugin.load()()
    plugin.load()()
    print("went on")
    """


@pytest.fixture
def guard(patched: Sandbox, cli: Cli) -> Path:
    place = patched.root / "guard"
    done = cli("generate", "--guard", str(place), "--patch-dir", str(patched.patches), "--patch", "around")
    assert (done.code, done.err) == (0, "")
    assert f"pip install --no-index {place}" in done.out
    return place


def run(sandbox: Sandbox, guard: Path, *flags: str, before: str = "", bundle: bool = False, **variables: str) -> Done:
    path = [*([sandbox.bundle] if bundle else []), guard, sandbox.site]
    return sandbox.python(f"{before}\n{dedent(RUN)}", *flags, path=path, **variables)


def test_with_a_bundle_it_is_silent(patched: Sandbox, guard: Path) -> None:
    for mode in ("auto", "strict"):
        assert run(patched, guard, bundle=True, LIVEPATCH=mode) == Done(0, "went on\n", "")
    assert not patched.state.exists()


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "disabled"])
def test_turned_off_it_is_silent(patched: Sandbox, guard: Path, word: str) -> None:
    assert run(patched, guard, LIVEPATCH=word) == Done(0, "went on\n", "")
    assert not patched.state.exists()


@pytest.mark.parametrize("flags", [(), ("-E",)], ids=" ".join)
@pytest.mark.parametrize("word", ["offf", "nonsense"])
def test_a_word_that_is_none_counts_as_off_and_it_says_so(
    patched: Sandbox, guard: Path, word: str, flags: tuple[str, ...]
) -> None:
    """Also where a bundle is on the path, and is left out."""
    before = f"import sys; sys.path[:0] = [{str(guard)!r}, {str(patched.site)!r}]"
    done = run(patched, guard, *flags, before=before, bundle=bool(flags), LIVEPATCH=word)
    says = f"vllm-livepatch: LIVEPATCH={word!r} is none of auto, off, strict; it counts as off, and no bundle is armed"
    assert (done.code, done.out, len(done.lines)) == (0, "went on\n", 2)  # it is called twice
    assert all(line.startswith(says) for line in done.lines)
    assert not patched.state.exists()


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_word_counts_as_unset(patched: Sandbox, guard: Path, word: str) -> None:
    assert run(patched, guard, bundle=True, LIVEPATCH=word) == Done(0, "went on\n", "")
    done = run(patched, guard, LIVEPATCH=word)
    assert "no bundle is armed in this process, nothing is patched: " in done.lines[0]


def test_with_a_bundle_the_bundle_says_it(patched: Sandbox, guard: Path) -> None:
    done = run(patched, guard, before=USE_STEP, bundle=True, LIVEPATCH="offf")
    assert done.out == f"{STOCK}went on\n"
    assert [line for line in done.lines if "LIVEPATCH='offf' is none of auto, off, strict; it counts as off" in line]
    assert "no bundle is armed" not in done.err


def test_without_a_bundle_it_says_so_and_leaves_a_report(patched: Sandbox, guard: Path, cli: Cli) -> None:
    done = run(patched, guard, before="import fakeengine.scheduler")
    assert (done.code, done.out) == (0, "went on\n")
    first, second = done.lines  # vLLM itself asks once; who asks twice is told twice
    assert first == second
    message = "vllm-livepatch: no bundle is armed in this process, nothing is patched: PYTHONPATH="
    assert first.startswith(message)
    assert "; 1 of its targets' modules are imported already (pid " in first
    around = patched.reports()[0]["patches"][0]
    assert (around["name"], around["state"], around["reason"]) == ("around", "skipped", "late")
    assert around["detail"].endswith("imported before: fakeengine.scheduler")
    assert patched.reports()[0]["version"] == bundle.version()
    logged = run(patched, guard, LIVEPATCH_LOG="json")
    assert json.loads(logged.lines[0])["message"].startswith("no bundle is armed")
    left = set(patched.state.iterdir())
    assert run(patched, guard, LIVEPATCH_STATE_KEEP="0").code == 0
    assert set(patched.state.iterdir()) == left, "a process removes its report at its end"


def test_only_what_is_wanted_counts_as_missing(patched: Sandbox, cli: Cli) -> None:
    """As `status --require` and the alerts take a reason: `optional` and `off` lack nothing."""
    for name in ("asked", "not-asked"):
        patched.patch(name, auto="off")
    guard = patched.root / "guard"
    chosen = [word for name in ("around", "asked", "not-asked") for word in ("--patch", name)]
    assert cli("generate", "--guard", str(guard), "--patch-dir", str(patched.patches), *chosen).code == 0
    run(patched, guard, LIVEPATCH_ASKED="On")
    run(patched, guard, LIVEPATCH_AROUND="0")
    found = [{patch["name"]: patch["reason"] for patch in report["patches"]} for report in patched.reports()]
    assert {"around": "late", "asked": "late", "not-asked": "optional"} in found
    assert {"around": "optional", "asked": "optional", "not-asked": "optional"} in found


@pytest.fixture
def hidden(patched: Sandbox, guard: Path) -> list[Path | str]:
    """A path on which another `sitecustomize` comes before the bundle, and does not run it."""
    other = patched.write({"sitecustomize.py": "own = 1\n"}, patched.root / "other")
    return [other, patched.bundle, guard, patched.site]


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_bundle_that_did_not_run_is_armed_late(patched: Sandbox, hidden: list[Path | str], mode: str) -> None:
    code = f"{dedent(RUN)}\n{USE_STEP}\nimport sitecustomize; print(sitecustomize.own)"
    done = patched.python(code, path=hidden, LIVEPATCH=mode)
    assert (done.code, done.out) == (0, f"went on\n{PATCHED}1\n")
    assert done.lines[0].startswith("vllm-livepatch: the bundle was armed late, by the guard: ")
    assert (
        f"{hidden[0]}/sitecustomize.py ran as sitecustomize in the place of {patched.bundle}'s (pid " in done.lines[0]
    )
    assert (patched.reported()["state"], patched.reported()["reason"]) == ("applied", None)


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_nor_did_it_with_a_flag_or_from_a_zip(patched: Sandbox, guard: Path, flag: str) -> None:
    archive = patched.root / "bundle.zip"
    placing.write_zip(bundle.contents(patched.entries()), archive)
    code = f"import sys; sys.path[:0] = [{str(guard)!r}, {str(patched.site)!r}]\n{dedent(RUN)}\n{USE_STEP}"
    for place in (patched.bundle, archive):
        done = patched.python(code, flag, path=[place])
        assert (done.code, done.out) == (0, f"went on\n{PATCHED}"), done.err
        assert "was armed late, by the guard: Python was started with -I or -E" in done.lines[0]


def test_what_was_imported_before_stays_as_it_is(patched: Sandbox, hidden: list[Path | str]) -> None:
    code = f"import fakeengine.scheduler\n{dedent(RUN)}\n{USE_STEP}"
    done = patched.python(code, path=hidden)
    assert (done.code, done.out) == (0, f"went on\n{STOCK}")
    assert "; 1 of its targets' modules are imported already (pid " in done.err
    around = patched.reported()
    assert (around["state"], around["reason"]) == ("skipped", "late")
    assert around["detail"] == "imported before the bundle was armed: fakeengine.scheduler"
    done = patched.python(code, path=hidden, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, "")


def test_a_damaged_bundle_is_not_armed_late(patched: Sandbox, hidden: list[Path | str]) -> None:
    (patched.bundle / "sitecustomize.py").write_text("raise ValueError('broken')\n")
    done = patched.python(dedent(RUN), path=hidden)
    assert (done.code, done.out) == (0, "went on\n")
    assert f"{patched.bundle} cannot be armed: ValueError: broken" in done.err
    assert "no bundle is armed in this process, nothing is patched" in done.err
    assert patched.python(dedent(RUN), path=hidden, LIVEPATCH="strict").code == 78


def test_status_shows_it(patched: Sandbox, guard: Path, cli: Cli) -> None:
    command = [PYTHON, "-c", "from vllm_livepatch_guard import check; check(); print(flush=True); input()"]
    environ = patched.environ(path=[guard])
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    arguments = ["status", "--state-dir", str(patched.state)]
    (found,) = json.loads(cli(*arguments, "--json").out)
    assert (found["pid"], found["patches"][0]["reason"]) == (process.pid, "late")
    assert "no bundle is armed in this process" in cli(*arguments).out
    process.communicate(b"\n", timeout=DEADLINE)


@pytest.mark.parametrize("mode", ["strict", "Strict "])
def test_strict_ends_it(patched: Sandbox, guard: Path, mode: str) -> None:
    done = run(patched, guard, LIVEPATCH=mode)
    assert (done.code, done.out, len(done.lines)) == (78, "", 1)
    assert done.err.startswith("vllm-livepatch: LIVEPATCH=strict: no bundle is armed in this process")


def test_why_there_is_none(patched: Sandbox, guard: Path) -> None:
    def why(*flags: str, path: list[Path | str]) -> str:
        code = f"import sys; sys.path.insert(0, {str(guard)!r}); import vllm_livepatch_guard; print(vllm_livepatch_guard.why_not())"
        return patched.python(code, *flags, path=path).out.strip()

    other = patched.write({"sitecustomize.py": ""}, patched.root / "other")
    assert why(path=[]) == "PYTHONPATH is not set in its environment"
    assert why(path=[patched.root / "none"]).startswith(f"PYTHONPATH={patched.root}/none names no bundle (not mounted")
    for flag in ("-I", "-E"):
        assert "-I or -E" in why(flag, path=[patched.bundle])
    assert "-S" in why("-S", path=[patched.bundle])
    assert why(path=[other, patched.bundle]) == (
        f"{other}/sitecustomize.py ran as sitecustomize in the place of {patched.bundle}'s"
    )
    beside = patched.write({"sitecustomize.py": ""}, patched.root / f"{patched.bundle.name}2")
    assert f"{beside}/sitecustomize.py ran as sitecustomize in the place of" in why(path=[beside, patched.bundle])
    emptied = patched.write({"sitecustomize.py": "", "manifest.json": "{}"}, patched.root / "emptied")
    places: list[list[Path | str]] = [[emptied], [emptied, patched.bundle]]
    for path in places:
        assert why(path=path) == f"{emptied} is a bundle, and its sitecustomize did not run"
    archive = patched.root / "bundle.zip"
    placing.write_zip(bundle.contents(patched.entries()), archive)
    assert why(path=[other, archive]).endswith(f"in the place of {archive}'s")


@pytest.mark.parametrize(
    ("version", "served"), [((3, 9, 2), False), ((3, 10, 0), True), ((3, 14, 2), True), ((3, 15, 0), False)]
)
def test_a_python_that_bundles_do_not_serve_is_named(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], served: bool
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, "final", 0))
    why = vllm_plugin.why_not()
    assert (why == f"bundles do not serve Python {version[0]}.{version[1]}") is not served


def test_it_installs_offline_and_answers(patched: Sandbox, guard: Path) -> None:
    """As `pip install DIR` does it, with nothing but what a new virtual environment has."""
    place = patched.root / "venv"
    venv.create(place)
    python = place / "bin/python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    page = (Path(__file__).parents[2] / "docs/operate.md").read_text("utf-8")
    (words,) = re.findall("`pip (install --no-index [^`]+)`", page)  # of a folder that pip takes for no name
    done = finish([*pip, *words.split()], patched.environ(path=[]), cwd=guard.parent)
    assert done.code == 0, done.err
    ask: list[str | Path] = [python, "-m", "vllm_livepatch_guard"]
    done = finish(ask, patched.environ(path=[]))
    assert (done.code, done.out) == (1, "no bundle is armed: PYTHONPATH is not set in its environment\n")
    armed = patched.environ(path=[patched.bundle])
    assert finish(ask, armed) == Done(0, "a bundle is armed\n", "")
    left_out = finish(ask, {**armed, "VLLM_PLUGINS": "mine,not_livepatch"})
    assert left_out.code == 1
    assert "VLLM_PLUGINS=mine,not_livepatch leaves the guard out: vLLM will not run it; add livepatch" in left_out.out
    assert finish(ask, {**armed, "VLLM_PLUGINS": "mine,livepatch"}).code == 0
    assert finish(ask, patched.environ(path=[], LIVEPATCH="off")) == Done(0, "LIVEPATCH turns it off\n", "")
    unknown = "LIVEPATCH='offf' is none of auto, off, strict; it counts as off\n"
    assert finish(ask, patched.environ(path=[], LIVEPATCH="offf")) == Done(1, unknown, "")
    assert finish([*pip, "check"], patched.environ(path=[])).code == 0
    # That, and one variable: also where an image's own sitecustomize hides the bundle.
    image = patched.write({"sitecustomize.py": ""}, patched.root / "image")
    path = [image, patched.bundle, patched.site]
    done = patched.python(f"{dedent(RUN)}\n{USE_STEP}", python=str(python), path=path, LIVEPATCH="strict")
    assert (done.code, done.out) == (0, f"went on\n{PATCHED}"), done.err


def test_it_replaces_itself_and_nothing_else(patched: Sandbox, guard: Path, cli: Cli) -> None:
    assert cli("generate", "--guard", str(guard)).code == 0
    assert "kv-block-reaper" in (guard / "vllm_livepatch_guard/__init__.py").read_text()
    done = cli("generate", "--guard", str(patched.site))
    assert (done.code, done.out) == (2, "")
    assert "exists and is not a guard" in done.err


def test_it_takes_the_words_that_the_bundle_takes() -> None:
    for word in (*vllm_plugin.ARMED, "off", "0", "no", "false", "disabled", "what"):
        mode = settings.read([], {"LIVEPATCH": word}).mode
        assert (mode != "off") == (word in vllm_plugin.ARMED), word
    words = (*vllm_plugin.ON, *vllm_plugin.OFF, "auto", "what")
    patch = catalogue.load()["kv-block-reaper"].patch
    for word in words:
        toggle = settings.read([patch], {"LIVEPATCH_KV_BLOCK_REAPER": word}).toggles[patch.name]
        assert (toggle in ("on", "force"), toggle == "off") == (word in vllm_plugin.ON, word in vllm_plugin.OFF), word


def test_of_two_bundles_that_were_hidden_the_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
        (place / "sitecustomize.py").touch()
        (place / "manifest.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace(__file__="/elsewhere/sitecustomize.py"))
    expected = f"/elsewhere/sitecustomize.py ran as sitecustomize in the place of {places[0]}'s"
    assert vllm_plugin.why_not() == expected


@pytest.mark.parametrize("error", [PermissionError(), zipfile.BadZipFile()])
def test_a_file_that_cannot_be_read_is_no_bundle(tmp_path: Path, mocker: MockerFixture, error: Exception) -> None:
    place = tmp_path / "bundle.zip"
    place.touch()
    mocker.patch.object(zipfile, "ZipFile", side_effect=error)
    assert vllm_plugin.is_bundle(str(place)) is False


@pytest.mark.parametrize("manifest", ["", "[]", "[" * 100_000, "pipe"])
def test_what_lies_on_the_path_and_is_no_bundle(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "sitecustomize.py").touch()
    if manifest == "pipe":
        os.mkfifo(tmp_path / "manifest.json")  # which nobody writes into
    else:
        (tmp_path / "manifest.json").write_text(manifest)
    assert vllm_plugin.generation_of(str(tmp_path)) == ""
