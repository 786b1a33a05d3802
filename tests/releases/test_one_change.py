"""`check` of a release in which one line is another: a screen says which, and what it stops."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from vllm_livepatch.tools import cli
from vllm_livepatch.tools.releases import sources

SCREEN = 60
COLUMNS = 80


def test_one_changed_line_fits_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    place = tmp_path / "site"
    shutil.copytree(sources.site_packages("vllm", "0.33.0"), place)
    shutil.copytree(sources.site_packages("lmcache", "0.5.6"), place, dirs_exist_ok=True)
    file = place / "vllm/v1/core/sched/scheduler.py"
    head = "    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:\n"
    text = file.read_text("utf-8")
    assert text.count(head) == 1
    file.write_text(text.replace(head, f"{head}        another = 1\n"), "utf-8")
    monkeypatch.setattr("sys.argv", ["vllm-livepatch", "check", "--site-packages", str(place)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert sum(max(1, -(-len(line) // COLUMNS)) for line in lines) <= SCREEN
    assert "+        another = 1" in lines
    assert "   stops, needed there: failed-loads, stable-request-ids" in lines
    assert "   stops, not needed there: chunked-lmcache-load, preemption-livelock" in lines
