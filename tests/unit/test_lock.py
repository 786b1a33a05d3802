"""patch.toml and patch.lock: what a person says and what a tool writes, together what a patch is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import locking
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.patch_lock import Form
from vllm_livepatch.tools.releases import published, registry
from vllm_livepatch.tools.releases.sources import SourcesError
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import newrelease

from tests.unit.support import STEP, Cli, Sandbox

F, G, HIT = "engine.a:A.f", "engine.a:A.g", "cache.tracker:Tracker.hit"
ONE, TWO = "1" * 16, "2" * 16
SAID: dict[str, Any] = {"title": "t", "package": "engine", "targets": [F, G], "calls": [HIT]}
FORMS = [
    Form("engine", ("1.0", "1.1"), {F: ONE}),
    Form("engine", ("1.2",), {F: ONE, G: TWO}),
    Form("cache", ("0.3",), {}),
    Form("cache", ("0.4", "0.5"), {HIT: TWO}),
]


def lock_of(forms: list[Form]) -> dict[str, Any]:
    lock: dict[str, Any] = tomllib.loads(patch_lock.written(forms, "engine", (F, G, HIT)))
    return lock


def test_both_files_make_the_patch() -> None:
    said = {"variant": [{"releases": ["1.1", "1.2"], "verdict": "fixed-upstream"}], "read": ["1.0", "1.2"]}
    patch = to_patch("p", patch_lock.joined({**SAID, **said}, lock_of(FORMS)))
    assert [(one.releases, one.verdict, one.read, dict(one.code)) for one in patch.variants] == [
        (("1.1",), "fixed-upstream", (), {F: ONE}),
        (("1.0",), "needed", ("1.0",), {F: ONE}),
        (("1.2",), "fixed-upstream", ("1.2",), {F: ONE, G: TWO}),
    ]
    companions = patch.companions["cache"]
    assert [(one.releases, one.verdict, dict(one.code)) for one in companions] == [
        (("0.3",), "not-present", {}),
        (("0.4", "0.5"), "needed", {HIT: TWO}),
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"variant": [{"releases": ["1.0"], "code": {F: ONE}}]}, "not in both"),
        ({"variant": [{"releases": ["1.0"]}, {"releases": ["1.0", "1.2"]}]}, "two variants name 1.0"),
        ({"variant": [{"releases": ["9.9"]}]}, "patch.lock knows nothing of 9.9"),
    ],
)
def test_files_that_do_not_fit(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        patch_lock.joined({**SAID, **said}, lock_of(FORMS))


@pytest.mark.parametrize("text", ["variant = 1", "[[variant]]\ncode = {}", "[code", "variant = [1]"])
def test_a_lock_that_no_tool_wrote_is_one_line(sandbox: Sandbox, text: str) -> None:
    sandbox.patch("my-fix", variant=[])
    folder = sandbox.patches / "my_fix"
    (folder / "patch.lock").write_text(text)
    with pytest.raises(UserError) as caught:
        catalogue.read(folder)
    assert str(caught.value).startswith(f"{folder}: patch.lock ")
    assert "\n" not in str(caught.value)


def test_dates_are_texts(sandbox: Sandbox) -> None:
    sandbox.patch("my-fix")
    file = sandbox.patches / "my_fix/patch.toml"
    options = '[[option]]\nname = "SINCE"\ndefault = 2020-01-02\n[about]\nlast_update = 2020-01-02\nat = [10:20:30]\n'
    file.write_text(file.read_text("utf-8") + options, "utf-8")
    patch = catalogue.read(file.parent).patch
    assert (patch.options[0].default, dict(patch.about)) == (
        "2020-01-02",
        {"last_update": "2020-01-02", "at": ["10:20:30"]},
    )
    sandbox.generate()


@pytest.mark.parametrize("command", ["check", "ready", "lock"])
@pytest.mark.parametrize(
    ("added", "said"),
    [
        ('about = "x"', "patch my-fix: about must be a table"),
        (f"about = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        (
            '[[option]]\nname = "limit"\ndefault = 1\n[[option]]\nname = "LIMIT"\ndefault = 2',
            "patch my-fix: two options are LIVEPATCH_MY_FIX_LIMIT",
        ),
        (f'targets = ["{F}", "{G}", "{F}"]', f"patch my-fix: targets names {F} twice"),
    ],
)
def test_what_patch_toml_cannot_say_is_one_line(
    sandbox: Sandbox, cli: Cli, command: str, added: str, said: str
) -> None:
    folder = sandbox.patches / "my_fix"
    folder.mkdir(parents=True)
    targets = "" if added.startswith("targets") else f'targets = ["{F}"]\n'
    (folder / "patch.toml").write_text(f'title = "t"\npackage = "engine"\n{targets}{added}\n')
    (folder / "wrappers.py").write_text("")
    asked = (str(folder),) if command != "check" else ("--patch-dir", str(sandbox.patches))
    done = cli(command, *asked)
    assert (done.code, done.err.count("\n")) == (2, 1), done
    assert f"{folder}/patch.toml: " in done.err, done
    assert said in done.err, done


@pytest.mark.parametrize("name", ["more.py", "wrappers.py", "patch.lock", "patch.toml", "proof.py"])
def test_a_pipe_in_a_folder_is_not_opened(new_patch: Callable[..., Path], cli: Cli, name: str) -> None:
    folder = new_patch([])
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    asked = [("check", "--patch-dir", str(folder.parent)), ("lock", str(folder), "--release", "1.0")]
    for command in (*asked, ("ready", str(folder))):
        done = cli(*command)
        assert (done.code, done.err.count("\n")) == (2, 1), done
        assert name == "patch.toml" or f"{folder}/{name} is no regular file" in done.err, done


codes = st.dictionaries(st.sampled_from([F, G]), st.sampled_from([ONE, TWO]), min_size=1)
companion_codes = st.dictionaries(st.just(HIT), st.sampled_from([ONE, TWO]))
releases = st.integers(0, 30).map(lambda number: f"1.{number}")


@given(st.dictionaries(releases, codes, min_size=1), st.dictionaries(releases, companion_codes))
def test_what_is_written_is_what_is_read(own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    together = {**{("engine", one): code for one, code in own.items()}}
    together |= {("cache", one): code for one, code in other.items()}
    forms = patch_lock.grouped(together)
    found = patch_lock.forms_of(lock_of(forms), "engine")
    assert {(form.package, one): dict(form.code) for form in found for one in form.releases} == together
    patch = to_patch("p", patch_lock.joined(SAID, lock_of(forms)))
    assert {one: dict(form.code) for form in patch.variants for one in form.releases} == own
    assert {one: dict(form.code) for form in patch.companions.get("cache", ()) for one in form.releases} == other


# The command


@pytest.fixture
def new_patch(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A patch that is not locked; releases of the fake engine: 1.0 and 1.1 are alike, 3.0 is in no registry."""

    def tree(package: str, release: str) -> Tree:
        if release == "3.0":
            raise SourcesError("there is no fakeengine 3.0")
        place = sandbox.root / release
        text = "return [number]" if release in ("1.0", "1.1") else "return [number, number]"
        method = "stepped" if release == "4.0" else "step"
        source = f"class Scheduler:\n    def {method}(self, number):\n        {text}\n"
        sandbox.write({"fakeengine/__init__.py": "", "fakeengine/scheduler.py": source}, place)
        return Tree([str(place)])

    def written(variant: list[dict[str, Any]], **facts: Any) -> Path:
        sandbox.patch("my-fix", variant=variant, **facts)
        return sandbox.patches / "my_fix"

    monkeypatch.setattr(published, "tree", tree)
    monkeypatch.setattr(
        check,
        "released",
        lambda asked, wheels, patches: {
            one.partition("==")[0]: _named(tree(*one.split("==")), one.partition("==")[2]) for one in asked
        },
    )
    return written


def _named(tree: Tree, version: str) -> Tree:
    tree.version = version  # type: ignore[attr-defined]
    return tree


def locked(folder: Path) -> list[tuple[tuple[str, ...], str]]:
    return [(one.releases, one.verdict) for one in catalogue.read(folder).patch.variants]


def test_a_new_patch_gets_its_fingerprints(new_patch: Callable[..., Path], cli: Cli) -> None:
    folder = new_patch([{"releases": ["2.0"], "verdict": "fixed-upstream"}])
    said = (folder / "patch.toml").read_text("utf-8")
    done = cli("lock", str(folder), "--release", "fakeengine==1.1", "--release", "1.0")
    assert done.code == 0, done.out + done.err
    assert "(2 forms of the code)" in (done.out + done.err)
    assert locked(folder) == [(("1.0", "1.1"), "needed"), (("2.0",), "fixed-upstream")]
    assert (folder / "patch.toml").read_text("utf-8") == said
    first = (folder / "patch.lock").read_text("utf-8")
    assert cli("lock", str(folder.parent), "--release", "1.0").code == 0  # a directory of patches
    assert (folder / "patch.lock").read_text("utf-8") == first


@pytest.mark.parametrize(("variant", "facts"), [([], {}), ([{"releases": ["4.0"]}], {})])
def test_without_a_release_that_has_the_code_nothing_is_written(
    new_patch: Callable[..., Path], cli: Cli, variant: list[Any], facts: Any
) -> None:
    folder = new_patch(variant, **facts)
    done = cli("lock", str(folder))
    assert (done.code, (folder / "patch.lock").exists()) == (2, False)


def test_a_release_without_the_code_is_known_as_one(new_patch: Callable[..., Path], cli: Cli) -> None:
    folder = new_patch([])
    done = cli("lock", str(folder), "--release", "1.0", "--release", "4.0")
    assert "fakeengine 4.0 has none of its targets" in (done.out + done.err)
    assert "locked for 1.0 (1 form of the code)" in (done.out + done.err)
    assert locked(folder) == [(("1.0",), "needed"), (("4.0",), "not-present")]


def test_a_lock_that_is_older_than_what_patch_toml_names(new_patch: Callable[..., Path], cli: Cli) -> None:
    folder = new_patch([], calls=[f"{STEP.partition(':')[0]}:Scheduler"])
    assert cli("lock", str(folder), "--release", "1.0").code == 0
    file = folder / "patch.toml"
    file.write_text(file.read_text("utf-8").replace(':Scheduler"', ':Scheduler.other"'), "utf-8")
    done = cli("ready", str(folder))
    assert done.code == 2
    older = (
        f"patch.lock is older: it has {STEP.partition(':')[0]}:Scheduler. vllm-livepatch lock {folder} writes it anew"
    )
    assert older in done.err
    cli("lock", str(folder))
    assert "older" not in cli("ready", str(folder)).err


def test_a_slip_in_patch_toml_is_not_taken_for_an_old_lock(new_patch: Callable[..., Path], cli: Cli) -> None:
    folder = new_patch([])
    assert cli("lock", str(folder), "--release", "1.0").code == 0
    file = folder / "patch.toml"
    file.write_text(file.read_text("utf-8").replace("targets", "target"), "utf-8")
    assert "no entry is called target\n" in cli("ready", str(folder)).err


def test_a_nightly_that_the_registry_does_not_have(sandbox: Sandbox, new_patch: Callable[..., Path], cli: Cli) -> None:
    folder = new_patch([])
    sandbox.write({"fakeengine/_version.py": "version = '3.0'\n"})
    assert cli("lock", str(folder), "--site-packages", str(sandbox.site)).code == 0
    assert locked(folder) == [(("3.0",), "needed")]
    assert cli("lock", str(folder), "--release", "2.0").code == 0  # the nightly's code stays as it was locked
    assert locked(folder) == [(("2.0",), "needed"), (("3.0",), "needed")]
    more = (folder / "patch.toml").read_text("utf-8").replace('"fakeengine"', f'"fakeengine"\ncalls = ["{STEP}er"]', 1)
    (folder / "patch.toml").write_text(more, "utf-8")
    done = cli("lock", str(folder))  # nobody knows whether the nightly has what the patch calls now
    assert done.code == 2
    assert "fakeengine 3.0" in (done.out + done.err)


def test_a_fork_keeps_what_was_locked_of_it(sandbox: Sandbox, new_patch: Callable[..., Path], cli: Cli) -> None:
    """The registry has its public release, whose code is another."""
    folder = new_patch([])
    scheduler = sandbox.site / "fakeengine/scheduler.py"
    text = scheduler.read_text()
    scheduler.write_text(text.replace("[number]", "[number, 'fork']"))
    sandbox.write({"fakeengine/_version.py": "version = '1.0+acme'\n"})
    assert cli("lock", str(folder), "--site-packages", str(sandbox.site)).code == 0
    kept = (folder / "patch.lock").read_text()
    assert cli("lock", str(folder)).code == 0
    assert (folder / "patch.lock").read_text() == kept
    assert cli("lock", str(folder), "--release", "1.0").code == 0
    assert locked(folder) == [(("1.0",), "needed"), (("1.0+acme",), "needed")]
    scheduler.write_text(text.replace("[number]", "[number, 'again']"))
    done = cli("lock", str(folder), "--site-packages", str(sandbox.site))
    assert f"what was locked as fakeengine 1.0+acme had other code of {STEP}" in (done.out + done.err)


def test_bad_input_is_one_line(sandbox: Sandbox, new_patch: Callable[..., Path], cli: Cli, tmp_path: Path) -> None:
    folder = new_patch([{"releases": ["1.0"]}])
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (
        [str(empty)],
        [str(folder), "--site-packages", str(empty)],
        [str(folder), "--site-packages", str(empty), "--python", "python3"],
        [str(folder), "--release", "3.0"],
    ):
        done = cli("lock", *words)
        assert done.code == 2, words
        assert not (folder / "patch.lock").exists()
    (folder / "patch.toml").write_text("title = ", "utf-8")
    assert cli("lock", str(folder)).code == 2


def test_two_packages(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it relies on, every pinned release is locked."""
    sources = {"cache": {"1.0": "hit = 0", "1.1": "hit = 1"}, "fakeengine": {"1.0": "def step(self): ..."}}

    def tree(package: str, release: str) -> Tree:
        place = sandbox.root / package / release
        body = f"class Scheduler:\n    {sources[package][release]}\n"
        sandbox.write({f"{package}/__init__.py": "", f"{package}/scheduler.py": body}, place)
        return Tree([str(place)])

    pins = [registry.Pin("cache", version, "w.whl", "", "") for version in sources["cache"]]
    monkeypatch.setattr(registry, "pins", lambda package: pins if package == "cache" else [])
    monkeypatch.setattr(published, "tree", tree)
    sandbox.patch("my-fix", variant=[{"releases": ["1.0"]}], calls=["cache.scheduler:Scheduler.hit"])
    (line,) = locking.lock(sandbox.patches / "my_fix", {})
    patch = catalogue.read(sandbox.patches / "my_fix").patch
    assert [one.releases for one in patch.companions["cache"]] == [("1.0",), ("1.1",)]
    assert line.endswith(" (1 form of the code)")


# A new release in both files

TOML = """title = "t"
package = "fakeengine"
targets = ["fakeengine.scheduler:Scheduler.step"]

[[variant]]
releases = ["0.9"]
verdict = "fixed-upstream"

[[variant]]
releases = [
    "1.0",
    "1.1",
]
facts = { how = "old" }
"""


@pytest.mark.parametrize(
    ("release", "releases", "done"),
    [
        ("1.1.1", [["0.9"], ["1.0", "1.1", "1.1.1"]], "the code of 1.1"),
        ("2.0", [["0.9"], ["1.0", "1.1", "2.0"]], "new code, proposed to be as 1.1: a person judges"),
        ("1.1", [["0.9"], ["1.0", "1.1"]], "listed already"),
        ("4.0", [["0.9"], ["1.0", "1.1"]], "not present, nothing to write"),
    ],
)
def test_a_release_more(sandbox: Sandbox, release: str, releases: list[list[str]], done: str) -> None:
    folder = sandbox.patches / "my_fix"
    folder.mkdir(parents=True)
    (folder / "patch.toml").write_text(TOML)
    code = f"def step(original, instance, *rest, **named): ...\ndef wrappers(livepatch): return {{'{STEP}': step}}\n"
    (folder / "wrappers.py").write_text(code)

    def tree(release: str) -> Tree:
        body = {"2.0": "x", "4.0": None, "0.9": "y"}.get(release, "z")
        source = "" if body is None else f"class Scheduler:\n    def step(self):\n        return {body}\n"
        sandbox.write({"fakeengine/__init__.py": "", "fakeengine/scheduler.py": source}, sandbox.root / release)
        return Tree([str(sandbox.root / release)])

    list(locking.lock(folder, {("fakeengine", one): tree(one) for one in ("0.9", "1.0", "1.1")}))
    entry = catalogue.read(folder)
    said, lock, word = newrelease.in_folder(entry, "fakeengine", release, "1.1", tree(release))
    assert word == done
    assert [one["releases"] for one in tomllib.loads(said)["variant"]] == releases
    (folder / "patch.toml").write_text(said)
    (folder / "patch.lock").write_text(lock)
    variants = catalogue.read(folder).patch.variants
    facts = {one: form.facts for form in variants for one in form.releases}
    assert facts.get(release, {"how": "old"}) == {"how": "old"}
    assert (release in facts) is (release != "4.0")
