"""What the demo concludes, and how it is reported; its model and its topology."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file
from vllm_livepatch.tools.lab import command, demo, logs, model, stages, summary, topology

LOG = [
    "(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512] Traceback (most recent call last):",
    '(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512]   File "/x/site-packages/vllm/s.py", line 9, in update',
    "(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512]     self._update_from_kv_xfer_finished(output)",
    '(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512]   File "/x/site-packages/vllm/s.py", line 5, in _update',
    "(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512]     assert req_id in self.requests",
    "(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512]            ^^^^^^^^^^^^^^^^^^^^^^^",
    "(EngineCore pid=7) ERROR 11-21 05:16:24 [core.py:1512] AssertionError",
    "(APIServer pid=5) INFO 11-21 05:16:25 [launcher.py:1] Shutting down",
]
STORM: dict[str, Any] = {
    "hang_ups_from": 1.2,
    "completed": 9,
    "disconnected": 4,
    "failed": 0,
    "mismatches": 0,
    "goodput": 0.5,
    "first_token": None,
    "between_tokens": None,
    "errors": {},
    "restarts": {},
    "errors_logged": {"lmcache": 0, "engine": 0},
    "assertion": [],
    "kv_usage": {"engine": [(0.0, 0.0), (1.0, 0.5)]},
    "death": None,
    "status": [],
}
SERIES = {"per_second": {"completed": [3, 3, 3], "disconnected": [0, 2, 2], "failed": [0, 0, 0]}}
STOCK: dict[str, Any] = {
    **STORM,
    **SERIES,
    "failed": 5,
    "errors": {"HTTP 500": 3, "ClientOSError": 2},
    "survived": False,
    "died_after": 0.4,
    "death": "engine ended with exit code 0",
    "assertion": logs.assertion_in(LOG),
    "errors_logged": {"lmcache": 0, "engine": 7},
}
PATCHED: dict[str, Any] = {
    **STORM,
    **SERIES,
    "survived": True,
    "kv_usage_at_end": {"engine": 0.0},
    "back_after": 0.3,
    "loaded_tokens": 1024,
    "status": [{"pid": 7, "patches": [{"name": demo.PATCH, "counters": {"send_unknown": 3, "recv_unknown": 0}}]}],
}


def verdict(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    checks = demo.judge(stock, patched, 120)
    return [check for check, passed in checks if not passed]


def result() -> dict[str, Any]:
    checks = [{"check": "one", "passed": True}, {"check": "two", "passed": False}]
    both = copy.deepcopy({"stock": STOCK, "patched": PATCHED})
    about = {"topology": "lmcache", "vllm": "1.0", "lmcache": "2.0", "faults": [], "disconnects": True, "seconds": 9.5}
    return {**about, "checks": checks, "setups": both}


def test_the_assertion_is_found_without_the_loggers_prefixes() -> None:
    assert logs.assertion_in(LOG) == [
        '  File "vllm/s.py", line 9, in update',
        "    self._update_from_kv_xfer_finished(output)",
        '  File "vllm/s.py", line 5, in _update',
        "    assert req_id in self.requests",
        "           ^^^^^^^^^^^^^^^^^^^^^^^",
        "AssertionError",
    ]
    assert logs.assertion_in(LOG[-1:]) == []


def test_all_is_well_when_stock_died_as_expected_and_patched_met_every_condition() -> None:
    assert verdict(STOCK, PATCHED) == []


@pytest.mark.parametrize(
    ("side", "change", "failed"),
    [
        ("stock", {"survived": True, "assertion": []}, "stock: the engine core dies"),
        ("stock", {"assertion": ["some other death"]}, "stock: the engine core dies"),
        ("patched", {"survived": False}, "patched: engine and LMCache server live through 120 s"),
        ("patched", {"failed": 1}, "patched: every request"),
        ("patched", {"mismatches": 1}, "patched: every output"),
        ("patched", {"completed": 0}, "patched: every output"),
        ("patched", {"errors_logged": {"lmcache": 0, "engine": 1}}, "patched: no error"),
        ("patched", {"kv_usage_at_end": {"engine": 0.01}}, "patched: KV usage"),
        ("patched", {"kv_usage_at_end": {"engine": None}}, "patched: KV usage"),
        ("patched", {"kv_usage_at_end": None}, "patched: KV usage"),
        ("patched", {"status": []}, "patched: the fault was met"),
    ],
)
def test_each_condition_counts(side: str, change: dict[str, Any], failed: str) -> None:
    sides = {"stock": STOCK, "patched": PATCHED}
    sides[side] = {**sides[side], **change}
    (found,) = verdict(sides["stock"], sides["patched"])
    assert found.startswith(failed)


def test_counters_are_added_up_over_the_processes() -> None:
    def process(name: str, **counters: int) -> dict[str, Any]:
        return {"patches": [{"name": name, "counters": counters}]}

    status = [
        process(demo.PATCH, send_unknown=2),
        process(demo.PATCH, send_unknown=1, recv_unknown=4),
        process("another", send_unknown=9),
    ]
    assert demo.stale_ids(status) == {"send_unknown": 3, "recv_unknown": 4}


def test_what_is_shown_is_plain_and_complete_and_what_is_kept_is_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.conclude(result(), tmp_path)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    rows = {line.split("  ")[1].strip(): line.split()[-2:] for line in text.splitlines() if line.startswith("  ")}
    assert rows["completed"] == ["9", "9"]
    assert rows["failed"] == ["5", "0"]
    assert rows["done by patches"] == ["-", demo.PATCH]
    assert re.search(rf"done by patches +- +{demo.PATCH} *\n +send_unknown: 3 *\n", text)
    assert "tokens loaded" in text
    assert "parts brought back" not in text  # nothing was, in either setup
    assert rows["KV usage at the end"] == ["engine", "0.0%"]
    assert rows["lines of errors in"] == ["7", "-"]
    assert max(len(line) for line in text.splitlines() if line.startswith("  ") and "|" not in line) <= 80
    assert "dead after 0.4 s" in text
    assert "HTTP 500: 3" in text
    assert "  | AssertionError" in text
    assert "ok      one\nFAILED  two\n" in text
    for picture in ("completions.png", "blocks.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / picture) in text
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result()))


def shown(found: dict[str, Any], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(summary.table(found))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_the_table_fits_a_terminal_of_80_columns_and_its_words_stay_whole() -> None:
    found = result()
    stock, patched = found["setups"]["stock"], found["setups"]["patched"]
    stock["death"] = "engine was ended by SIGKILL (exit code 137)"
    found["setups"]["stock"]["longest_wait"], patched["longest_wait"] = 13.2, 4.1
    times = {"0.5": 0.123, "0.99": 1.23}
    for setup in (stock, patched):
        setup |= {"first_token": times, "between_tokens": times}
    patched["status"][0]["patches"].append({"name": "offloading-failed-transfers", "counters": {"offloaded": 12345}})
    lines = shown(found, 80)
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    cells = {word for row in summary.rows(found) if set(row[1:]) != {"-"} for cell in row for word in cell.split()}
    assert cells <= words
    narrow = shown(found, 50)
    assert max(map(len, narrow)) <= 50
    assert "…" not in "".join(narrow)


@pytest.mark.parametrize(
    ("setup", "cell"),
    [
        ({"survived": True, "longest_wait": 13.2}, "13.2 s"),
        (
            {"survived": False, "longest_wait": 13.2, "death": "engine ended with exit code 0"},
            "13.2 s, then engine was dead",
        ),
        ({"survived": False, "longest_wait": None, "death": "lmcache ended with exit code 1"}, None),
    ],
)
def test_a_wait_beside_a_dead_part_says_so(setup: dict[str, Any], cell: str | None) -> None:
    assert summary._longest(setup) == cell


def test_building_and_starting_are_under_a_bar_in_a_terminal() -> None:
    screen = io.StringIO()
    with stages.Stages(3, Console(file=screen, force_terminal=True, width=100)) as shown:
        shown.begin("making bundles")
        shown.done("making bundles")
        shown.begin("starting stock engine")
        shown.begin("starting patched engine")
        shown.done("what never began")
        shown._bar.refresh()
        assert "starting stock engine and 1 more" in screen.getvalue()
        assert "1/3" in screen.getvalue()
        shown.done("starting stock engine")
        shown.done("starting stock engine")  # a part that was brought back, say
        shown._bar.refresh()
        assert "starting patched engine " in screen.getvalue()
        assert "2/3" in screen.getvalue()
        shown.end()
        shown.done("starting patched engine")  # nothing is to be seen of it any more
    assert "3/3" not in screen.getvalue()


def test_there_is_no_bar_where_stdout_is_no_terminal() -> None:
    screen = io.StringIO()
    with stages.Stages(1, Console(file=screen)) as shown:
        shown.begin("making bundles")
        shown.done("making bundles")
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "1"], "Invalid value for '--seconds'"),
        (["--out", "/dev/null"], "/dev/null cannot be the output directory: File exists"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "vllm_livepatch.tools.lab.demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"demo: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_the_model_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    trees = [model.make(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    contents = [{file.name: file.read_bytes() for file in tree.iterdir()} for tree in trees]
    assert contents[0] == contents[1]
    assert {name for name in contents[0] if contents[0][name] != contents[2][name]} == {"model.safetensors"}
    weights = load_file(trees[0] / "model.safetensors")
    assert weights["lm_head.weight"].shape == (model.VOCABULARY, model.HIDDEN)
    assert {str(tensor.dtype) for tensor in weights.values()} == {"float32"}


def test_prompts_have_the_asked_length_known_words_and_no_common_prefix(tmp_path: Path) -> None:
    tokenizer = json.loads((model.make(tmp_path) / "tokenizer.json").read_text())
    prompts = model.prompts(24, 100, seed=5)
    assert {len(prompt.split()) for prompt in prompts} == {100}
    assert {word for prompt in prompts for word in prompt.split()} <= set(tokenizer["model"]["vocab"])
    assert len({tuple(prompt.split()[: topology.BLOCK_SIZE]) for prompt in prompts}) == len(prompts)
    assert prompts == model.prompts(24, 100, seed=5) != model.prompts(24, 100, seed=6)


def test_the_topology_injects_into_both_parts_and_lets_nothing_else_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    python = tmp_path / "bin" / "python"
    deployed = topology.local(topology.load("lmcache"), python, tmp_path / "model", {"PYTHONPATH": "/bundle"})
    server, engine = deployed.parts
    assert (server.name, engine.name) == ("lmcache", "engine")
    assert server.command[:2] == (str(tmp_path / "bin" / "lmcache"), "server")
    assert engine.command[0] == str(python)
    port = server.command[server.command.index("--port") + 1]
    connector = json.loads(engine.command[engine.command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"]["lmcache.mp.port"] == int(port)
    assert engine.health.startswith(deployed.url)
    for part in deployed.parts:
        assert part.environment["PYTHONPATH"] == "/bundle"
        assert part.environment["PATH"].startswith(str(tmp_path / "bin"))
        assert "A_SECRET" not in part.environment
    assert len(set(topology.free_ports(20))) == 20
