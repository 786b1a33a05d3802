"""A state directory that others may write to, or may not be read: what they leave there hides nothing beside it."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from vllm_livepatch.tools.commands import metrics, rendering
from vllm_livepatch.tools.in_bundle import command, reading, status, summary, verdicts

from tests.unit import fleet
from tests.unit.support import Cli, Done

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    10**400,
    1e400,
    float("nan"),
    1.5,
    "",
    "x",
    "[/x]",
    "\x1b[31mr\n\rx\u202e",
    "\ud800",
]
VALUES += [[], [1], ["a"], [{}], {}, {"a": 1}, {"a": "b"}]
Path_ = tuple[Any, ...]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def places(value: Any, before: Path_ = ()) -> Iterator[Path_]:
    yield before
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*before, key))


def changed(content: Any, place: Path_, value: Any) -> Any:
    """With this in that place; `places` itself stands for nothing there."""
    new = {"": copy.deepcopy(content)}
    inner, last = new, ""
    for key in place:
        inner, last = inner[last], key
    if value is places:
        del inner[last]
    else:
        inner[last] = value
    return new.get("")


def everything(state: Path) -> tuple[status.Reports, list[str]]:
    """All that is asked of a directory, as text."""
    found = status.read(state)
    of_all = summary.summary(found)
    status.prune(found)
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    console.print(rendering.status_view(found, state))
    output = [
        summary.processes_text(found),
        summary.overview(found),
        summary.summary_text(of_all),
        *status.unmet(found, [status.Required("around"), status.Required("b", 2)]),
    ]
    output += [screen.getvalue(), generate_latest(metrics.registry(lambda: found)).decode()]
    for value in (found.live, of_all):
        json.dumps(value, allow_nan=False)
    return found, output


@pytest.mark.parametrize("own", [False, True])
def test_any_value_in_any_place_of_a_report(state: Path, own: bool) -> None:
    """It is shown or passed over, with nothing in it that a terminal would obey; the one beside it is always shown."""
    patches = (
        fleet.patch("around", counters={"calls": 2}, targets=["a:b"], version=1),
        fleet.patch("b", "failed", "x"),
    )
    file = (fleet.leave_own if own else fleet.leave)(state, *patches)
    content = json.loads(file.read_text("ascii"))
    beside = fleet.leave(state, fleet.patch("around"), pid=77)
    counts = {1: 0, 2: 0}
    for place in places(content):
        for value in (*VALUES, places):
            file.write_text(json.dumps(changed(content, place, value)), "ascii")
            found = status.read(state)
            assert 77 in [process["pid"] for process in found.live], (place, value)
            counts[len(found.live)] += 1
            if len(found.live) == 1:
                continue  # as without it
            _, output = everything(state)
            text = "\n".join(output)
            assert reading._OBEYED.search(text) is None, (place, value)
            text.encode()
    assert beside.exists()
    assert min(counts.values()) > 50


FORGED = "x\npid 1 on here\tsince ever"


@pytest.mark.parametrize(
    "more",
    [
        *({key: FORGED} for key in ("host", "started", "bundle", "version", "digest", "python")),
        {"packages": {FORGED: "1.0", "vllm": FORGED}},
        {"patches": [fleet.patch(FORGED, "failed", FORGED, verdict=FORGED, counters={FORGED: 1}, targets=[FORGED])]},
    ],
    ids=lambda more: str(*more),
)
def test_a_line_break_makes_no_line_of_its_own(state: Path, more: dict[str, Any]) -> None:
    """It would look like another process, or another patch."""
    file = fleet.leave(state, fleet.patch("around"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    found = status.read(state)
    required = [status.Required(patch["name"], 2) for patch in found.live[0]["patches"]]
    shown = [
        summary.processes_text(found),
        summary.summary_text(summary.summary(found)),
        *status.unmet(found, required),
    ]
    assert not [line for text in shown for line in text.splitlines() if line.lstrip().startswith("pid 1 on here")]
    assert not re.search(r"\\[nt]", json.dumps(found.live))


def test_the_name_of_a_file_makes_no_line_of_its_own(tmp_path: Path) -> None:
    found = status.Reports([], [], [], [tmp_path / "a\nb\x1b.json"])
    assert f"such as {tmp_path}/a b?.json: " in status.unread(found)


def test_a_truth_is_no_number(state: Path) -> None:
    """Scripts read what `--json` shows."""
    fleet.leave(state, pid=True)
    fleet.leave(state, fleet.patch("around", counters={"calls": True}))
    assert everything(state)[0].live == []


def test_a_patch_twice_is_no_report(state: Path) -> None:
    """Prometheus would refuse the page for it."""
    fleet.leave(state, fleet.patch("around"), fleet.patch("around"))
    assert everything(state)[0].live == []


@pytest.fixture
def another() -> Iterator[Path]:
    """A directory that anybody may look into, seen as a user who may not read everything."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        yield Path(place)


class Unprivileged:
    """Root may read everything: as somebody else for a while, where the tests are root's."""

    def __enter__(self) -> None:
        self._root = os.geteuid() == 0
        if self._root:
            os.seteuid(65534)

    def __exit__(self, *error: object) -> None:
        if self._root:
            os.seteuid(0)


def ask(capfd: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """The bundle's own `status`, in this process: another user may not read what the tests' own would import."""
    none = verdicts.Catalogue("0", (), {})  # these modules are in no bundle
    with pytest.MonkeyPatch.context() as here:
        here.setattr(verdicts, "catalogue", lambda: none)
        with Unprivileged(), pytest.raises(SystemExit) as ended:
            command.main("/livepatch", ["status", *arguments])
    captured = capfd.readouterr()
    return Done(int(str(ended.value.code)), captured.out, captured.err)


def test_the_report_of_another_user_is_not_passed_over(another: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fleet.leave(another, fleet.patch("around"))
    hidden = fleet.leave(another, fleet.patch("around", "failed", "raised"))
    hidden.chmod(0)
    found = [ask(capfd, "--state-dir", str(another), *more) for more in ([], ["--summary"], ["--require", "around"])]
    message = f"vllm-livepatch: 1 report cannot be read here, such as {hidden}: another user's, or of another version; ask as the user of the engine, by its own bundle\n"
    assert [(done.code, done.err) for done in found] == [(0, message), (0, message), (1, message)]
    assert "1 process on 1 host\n" in found[1].out


def test_what_is_no_plain_file_is_neither_waited_for_nor_followed(state: Path, tmp_path: Path, cli: Cli) -> None:
    """A pipe that nobody writes to, a link out of the directory, a file that would fill the memory."""
    fleet.leave(state, fleet.patch("around"))
    os.mkfifo(state / "node1-7-00000000000000aa.json")
    elsewhere = fleet.leave(tmp_path / "elsewhere", fleet.patch("around", "failed", "raised"))
    (state / "node1-7-00000000000000ab.json").symlink_to(elsewhere)
    with open(state / "node1-7-00000000000000ac.json", "wb") as huge:
        huge.write(elsewhere.read_bytes())
        huge.write(b" " * (16 << 20))
    done = cli.process("status", "--state-dir", str(state), "--require", "around", "--json")
    assert (done.code, len(json.loads(done.out)), done.err) == (0, 1, "")


@pytest.mark.parametrize("name", ["node1-7-00000000000000aa.json", "settings.json"])
def test_the_report_of_a_later_version_is_not_passed_over(state: Path, cli: Cli, name: str) -> None:
    """Its process may lack what is asked for. Another file of JSON that lies there is nobody's report."""
    fleet.leave(state, fleet.patch("around"))
    (state / name).write_text(json.dumps({"pid": 7, "patches": {"around": "dormant"}}))
    done = cli("status", "--state-dir", str(state), "--require", "around")
    assert (done.code, "cannot be read here" in done.err) == ((1, True) if "node1" in name else (0, False))
    (state / name).write_text("")  # as a crash of the machine leaves it
    assert cli("status", "--state-dir", str(state), "--require", "around").code == 0


def test_what_cannot_be_removed_is_not_reported_as_removed(another: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left = fleet.leave_own(another, alive=False)
    another.chmod(0o555)
    done = ask(capfd, "--state-dir", str(another), "--prune")
    another.chmod(0o755)
    assert (done.code, done.err) == (0, "removed the reports of 0 ended processes: -\n")
    assert left.exists()


@pytest.mark.parametrize("below", ["", "below"])
def test_a_directory_that_is_not_to_be_looked_into(
    another: Path, capfd: pytest.CaptureFixture[str], below: str
) -> None:
    """It is not said to hold no process."""
    closed = another / "closed"
    (closed / "below").mkdir(parents=True)
    closed.chmod(0)
    done = ask(capfd, "--state-dir", str(closed / below))
    closed.chmod(0o700)
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert str(closed / below) in done.err
    assert ("not to be seen by this user" in done.err) == bool(below)


def test_what_nobody_foresaw_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    state.mkdir()
    monkeypatch.setattr(status, "read", full)
    done = cli("status", "--state-dir", str(state))
    assert (done.code, done.err) == (2, "vllm-livepatch: /somewhere: No space left on device\n")
