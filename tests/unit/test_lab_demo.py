"""What the demo concludes, and how it is reported; its model and its topology."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file
from vllm_livepatch.tools.lab import demo, model, report, topology
from vllm_livepatch.tools.lab.storm import Load

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
STORM: dict[str, Any] = {"hang_ups_from": 1.2, "completed": 9, "disconnected": 4, "failed": 0, "mismatches": 0}
SERIES = {"per_second": {"completed": [3, 3, 3], "disconnected": [0, 2, 2], "failed": [0, 0, 0]}}
STOCK: dict[str, Any] = {
    **STORM,
    **SERIES,
    "failed": 5,
    "survived": False,
    "died_after": 0.4,
    "death": "ended with exit code 0",
    "assertion": demo._assertion(LOG),
}
PATCHED: dict[str, Any] = {
    **STORM,
    **SERIES,
    "survived": True,
    "errors_logged": 0,
    "kv_usage_at_end": 0.0,
    "loaded_tokens": 1024,
    "stale_ids": {"send_unknown": 3, "novel": 1},
}


def verdict(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    checks = demo._judge(stock, patched, Load(prompts=()))
    return [check for check, passed in checks if not passed]


def result() -> dict[str, Any]:
    load = {"clients": 24, "calm": 1.0, "disconnect_share": 0.6, "disconnect_within": 0.4}
    checks = [{"check": "one", "passed": True}, {"check": "two", "passed": False}]
    both = copy.deepcopy({"stock": STOCK, "patched": PATCHED})
    return {"vllm": "1.0", "lmcache": "2.0", "load": load, "checks": checks, **both}


def test_the_assertion_is_found_without_the_loggers_prefixes() -> None:
    assert demo._assertion(LOG) == [
        '  File "vllm/s.py", line 9, in update',
        "    self._update_from_kv_xfer_finished(output)",
        '  File "vllm/s.py", line 5, in _update',
        "    assert req_id in self.requests",
        "           ^^^^^^^^^^^^^^^^^^^^^^^",
        "AssertionError",
    ]
    assert demo._assertion(LOG[-1:]) == []


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
        ("patched", {"errors_logged": 1}, "patched: no error"),
        ("patched", {"kv_usage_at_end": 0.01}, "patched: KV usage"),
        ("patched", {"stale_ids": {}}, "patched: the fault was met"),
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
    assert demo._dropped(status) == {"send_unknown": 3, "recv_unknown": 4}


def test_the_table_is_plain_and_complete_when_it_is_piped() -> None:
    stream = io.StringIO()
    report.show(result(), Console(file=stream, width=100))
    text = stream.getvalue()
    assert "\x1b" not in text
    rows = {line.split("  ")[1].strip(): line.split()[-2:] for line in text.splitlines() if line.startswith("  ")}
    assert rows["completed"] == ["9", "9"]
    assert rows["failed"] == ["5", "0"]
    assert rows["stale ids: send_unknown"] == ["-", "3"]
    assert rows["stale ids: recv_unknown"] == ["-", "0"]
    assert rows["stale ids: novel"] == ["-", "1"]
    assert rows["KV usage at the end"] == ["-", "0.0%"]
    assert "no: dead after 0.4 s" in text
    assert "FAILED  two" in text


def test_the_picture_is_a_picture_and_the_json_is_the_result(tmp_path: Path) -> None:
    report.picture(result(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    report.write(result(), tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == result()


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
