"""The metrics: their form, a real Prometheus that scrapes them, its alerts, and the dashboard that shows them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm_livepatch.tools import commands
from vllm_livepatch.tools.commands import metrics
from vllm_livepatch.tools.in_bundle import status
from vllm_livepatch.tools.in_bundle.reading import STATES

from tests.unit import debian, fleet
from tests.unit.support import Cli, until

MONITORING = Path(next(iter(commands.__path__))) / "monitoring"
ALERTS, DASHBOARD = MONITORING / "alerts.yml", MONITORING / "dashboard.json"
OURS = re.compile(r"\blivepatch_[a-z_]+\b")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two processes: one in which all is as it should be, one in which something is not."""
    place = tmp_path / "state"
    counted = fleet.patch("around", counters={"calls": 3, "late": 1})
    fleet.leave(place, counted, fleet.patch("other", "armed"), pid=7, host="node1")
    broken = fleet.patch("around", "failed", "raised"), fleet.patch("other", "skipped", "optional")
    fleet.leave(place, *broken, pid=8, host="node2", version="0.1.1", digest=None, argv=["vllm", "--api-key", "hush"])
    return place


def page(state: Path) -> str:
    return generate_latest(metrics.registry(lambda: status.read(state))).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    named = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}
    assert len(named) == len(found)  # Prometheus takes no page that has a series twice
    return named


def series(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


def test_what_is_there(state: Path) -> None:
    one, two = ("node1", "7"), ("node2", "8")
    found = samples(page(state))
    heartbeats = {key: found.pop(key) for key in list(found) if key[0].startswith("livepatch_heartbeat")}
    assert {key[1] for key in heartbeats} == {(("host", host), ("pid", pid)) for host, pid in (one, two)}
    counts = {one: {"applied": 1, "armed": 1}, two: {"failed": 1, "skipped": 1}}
    assert found == {
        series("livepatch_processes"): 2,
        series("livepatch_info", version="0.2.0", digest=fleet.DIGEST, host="node1", pid="7"): 1,
        series("livepatch_info", version="0.1.1", digest="", host="node2", pid="8"): 1,
        **{
            series("livepatch_patches", state=state, host=host, pid=pid): counts[host, pid].get(state, 0)
            for host, pid in counts
            for state in STATES
        },
        series("livepatch_patch", patch="around", state="applied", verdict="needed", host="node1", pid="7"): 1,
        series("livepatch_patch", patch="around", state="failed", verdict="needed", host="node2", pid="8"): 1,
        series("livepatch_patch_missing", patch="around", reason="raised", host="node2", pid="8"): 1,
        series("livepatch_events_total", patch="around", kind="calls", host="node1", pid="7"): 3,
        series("livepatch_events_total", patch="around", kind="late", host="node1", pid="7"): 1,
    }
    assert "hush" not in page(state)


# The state, the reason, the verdict and the switch; whether it counts as missing.
MISSING = [
    ("applied", None, "needed", "auto", False),
    ("applied", "partly", "needed", "auto", False),
    ("armed", None, None, "auto", False),
    ("failed", "overwritten", "needed", "auto", True),
    ("skipped", "drifted", "drifted", "auto", True),
    ("skipped", "imported", "needed", "auto", True),
    ("skipped", "optional", "drifted", "auto", False),
    ("skipped", "off", "needed", "off", False),
    ("skipped", "fixed-upstream", "fixed-upstream", "auto", False),
    ("skipped", "not-present", "not-present", "auto", False),
    ("skipped", "not-present", "not-present", "on", False),
    ("skipped", "fixed-upstream", "fixed-upstream", "force", False),
    ("skipped", "unneeded", "drifted", "auto", False),
]


@pytest.mark.parametrize(("kind", "reason", "verdict", "toggle", "missing"), MISSING)
def test_what_is_missing(
    tmp_path: Path, kind: str, reason: str | None, verdict: str | None, toggle: str, missing: bool
) -> None:
    settings = {"mode": "auto", "toggles": {"around": toggle}, "options": {}}
    fleet.leave(tmp_path / "state", fleet.patch("around", kind, reason, verdict=verdict), settings=settings)
    assert ("livepatch_patch_missing{" in page(tmp_path / "state")) == missing


def test_one_pid_in_two_namespaces_of_a_host(tmp_path: Path) -> None:
    """Containers on the host's network: each has its pid 7. In one namespace, the later one has the pid now."""
    state = tmp_path / "state"
    for namespace, version, silent in (("pid:[1] a", "1", 0.0), ("pid:[2] a", "2", 0.0), ("pid:[2] a", "old", 9.0)):
        fleet.leave(state, fleet.patch("around"), pid=7, pid_namespace=namespace, version=version, silent=silent)
    found = samples(page(state))
    infos = {dict(labels)["version"]: dict(labels)["pid"] for name, labels in found if name == "livepatch_info"}
    assert infos == {"1": "7 in pid:[1] a", "2": "7 in pid:[2] a"}


def test_who_fell_silent_is_left_out(tmp_path: Path) -> None:
    state = tmp_path / "state"
    fleet.leave(state, fleet.patch("around"), silent=181.0)
    assert samples(page(state)) == {series("livepatch_processes"): 0}
    fleet.leave(state, fleet.patch("around"), silent=100.0)
    fleet.leave_own(state, fleet.patch("around"), silent=1000.0)  # seen to be alive
    assert len([name for name, _ in samples(page(state)) if name == "livepatch_info"]) == 2


def test_of_a_patch_that_is_armed_or_not_wanted_there_is_its_number_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    unwanted = ("off", "optional", "fixed-upstream", "not-present", "unneeded")
    patches = [fleet.patch(reason, "skipped", reason, version=1) for reason in unwanted]
    missing = fleet.patch("missing", "skipped", "drifted", verdict="drifted", version=4)
    fleet.leave(state, *patches, fleet.patch("armed", "armed", version=2), missing, pid=7)
    found: dict[tuple[Any, ...], float] = {
        (name, *sorted(dict(labels).items())): value for (name, labels), value in samples(page(state)).items()
    }
    who = ("host", "node1"), ("pid", "7")
    named = {name: value for name, value in found.items() if any(label[0] == "patch" for label in name[1:])}
    assert named == {
        ("livepatch_patch", who[0], ("patch", "missing"), who[1], ("state", "skipped"), ("verdict", "drifted")): 1,
        ("livepatch_patch_missing", who[0], ("patch", "missing"), who[1], ("reason", "drifted")): 1,
        ("livepatch_patch_version", who[0], ("patch", "missing"), who[1]): 4,
    }
    counts = {dict(key[1:])["state"]: value for key, value in found.items() if key[0] == "livepatch_patches"}
    assert counts == {"armed": 1, "applied": 0, "skipped": 6, "failed": 0}


def test_promtool_finds_nothing_to_mend(state: Path) -> None:
    command = [str(debian.needed("promtool")), "check", "metrics"]
    checked = subprocess.run(command, input=page(state), capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_file_for_node_exporter(state: Path, cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "textfiles"
    place.mkdir()
    file = place / "livepatch.prom"
    arguments = ["status", "--state-dir", str(state), "--prometheus", str(file)]
    done = cli(*arguments)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert samples(file.read_text()) == samples(page(state))
    before = file.stat().st_ino
    with open(file) as reading:  # who reads while it is written sees the whole of one
        assert cli(*arguments).code == 0
        assert samples(reading.read()) == samples(page(state))
    assert file.stat().st_ino != before
    assert list(place.iterdir()) == [file]
    assert cli(*arguments, "--require", "around").code == 1  # a cron job that writes it may also ask
    done = cli("status", "--state-dir", str(state), "--prometheus", str(file / "below"))
    assert (done.code, len(done.lines)) == (2, 1)
    assert "cannot be written" in done.err


@contextmanager
def serving(state: Path, *options: str, address: str = "127.0.0.1") -> Iterator[str]:
    """`status --serve`: the address that it says."""
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "status", "--state-dir", str(state), "--serve", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert line.startswith(f"serving http://{address}:"), line
        yield line.split()[1]
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def test_what_is_served_is_read_anew_each_time(state: Path) -> None:
    with serving(state, "--address", "127.0.0.2", address="127.0.0.2") as url:
        assert samples(get(url)) == samples(page(state))
        shutil.rmtree(state)
        assert samples(get(url)) == {series("livepatch_processes"): 0}


def test_a_port_that_is_taken(state: Path, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for wrong in (str(port), "70000"):
            done = cli("status", "--state-dir", str(state), "--serve", wrong)
            assert (done.code, len(done.lines)) == (2, 1)
            assert f"nothing can be served on 127.0.0.1, port {wrong}" in done.err


def test_a_real_node_exporter_hands_the_file_on(state: Path, cli: Cli, tmp_path: Path) -> None:
    program = debian.needed("prometheus-node-exporter")
    place = tmp_path / "textfiles"
    place.mkdir()
    assert cli("status", "--state-dir", str(state), "--prometheus", str(place / "livepatch.prom")).code == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={place}"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([program, *flags, f"--web.listen-address={own}"], stdout=log, stderr=log)

    def scraped() -> str:
        try:
            return get(f"http://{own}/metrics")
        except (ConnectionError, urllib.error.URLError):
            return ""

    try:
        found = samples(until(scraped, 30))
    finally:
        process.terminate()
        process.wait(30)
    assert found[series("node_textfile_scrape_error")] == 0
    ours = {name: value for name, value in found.items() if name[0].startswith("livepatch_")}
    assert ours == samples((place / "livepatch.prom").read_text())


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@contextmanager
def scraping(url: str, place: Path) -> Iterator[str]:
    """A real Prometheus that scrapes `url` and has our alerts: its own address."""
    program = debian.needed("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = f"127.0.0.1:{free.getsockname()[1]}"
    shutil.copy(ALERTS, place / "alerts.yml")
    jobs = [{"job_name": "livepatch", "static_configs": [{"targets": [urllib.parse.urlparse(url).netloc]}]}]
    timing = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configured = {"global": timing, "rule_files": ["alerts.yml"], "scrape_configs": jobs}
    (place / "prometheus.yml").write_text(json.dumps(configured))  # which is YAML, too
    flags = [f"--web.listen-address={own}", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with open(place / "log", "w") as log:
        process = subprocess.Popen([program, *flags], cwd=place, stdout=log, stderr=log)
    try:
        yield f"http://{own}"
    finally:
        process.terminate()
        process.wait(30)


def query(server: str, expression: str) -> list[dict[str, Any]]:
    """Raises OSError while the server is on its way, or nothing is found as yet."""
    asked = urllib.parse.urlencode({"query": expression})
    try:
        answer = json.loads(get(f"{server}/api/v1/query?{asked}"))
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it listens, and is not ready
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    return list(answer["data"]["result"])


def expressions() -> list[str]:
    """All that the dashboard asks, as Grafana would ask for all hosts."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [found.replace("$host", ".*").replace("$__rate_interval", "1m") for found in found]


def variables() -> list[dict[str, Any]]:
    return list(json.loads(DASHBOARD.read_text("utf-8"))["templating"]["list"])


STATS = {
    "Live patched processes": "2",
    "Patches that are wanted and not applied": "1",
    "Bundles in use": "2",
    "Longest silence of a process": None,
}
"""What the panels of one number show of `state`. (Where nothing is found, they show a 0.)"""


def stats_and_tables_show_what_is_there(answers: Callable[[str], list[dict[str, Any]]]) -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    shown = {panel["title"]: answers(asked) for panel, asked in zip(panels, expressions(), strict=True)}
    assert {panel["title"] for panel in panels if panel["type"] == "stat"} == STATS.keys()
    for title, number in STATS.items():
        ((_, value),) = (one["value"] for one in shown[title])
        assert value == number or (number is None and 0 < float(value) < 600), title
    for panel in panels:  # a column that is left out, or called otherwise, is one that there is
        columns = {"Time", "Value", *(name for one in shown[panel["title"]] for name in one["metric"])}
        for options in (one["options"] for one in panel.get("transformations", ())):
            assert {*options.get("excludeByName", ()), *options.get("renameByName", ())} <= columns, panel["title"]


def test_a_real_prometheus_scrapes_alerts_and_answers_the_dashboard(state: Path, tmp_path: Path) -> None:
    debian.needed("prometheus")
    with serving(state) as url, scraping(url, tmp_path) as server:

        def answers(expression: str) -> list[dict[str, Any]]:
            try:
                return query(server, expression)
            except (ConnectionError, urllib.error.URLError):
                return []

        (found,) = until(lambda: answers('livepatch_events_total{kind="calls"}'), 60)
        labels = {"patch": "around", "kind": "calls", "host": "node1", "pid": "7"}
        assert labels.items() <= found["metric"].items()
        assert found["value"][1] == "3"
        for expression in expressions():
            asked = expression.removesuffix(" or vector(0)")  # which always gives one
            series_found = until(functools.partial(answers, asked), 60)  # a rate takes two scrapes
            grouped = re.match(r"(?:sum|count) by \(([a-z, ]+)\)", asked)
            if grouped is not None:  # by labels that there are; an empty one is left out
                assert set().union(*(one["metric"] for one in series_found)) == set(grouped[1].split(", ")), asked
        stats_and_tables_show_what_is_there(answers)
        (listed,) = (one["definition"] for one in variables() if one["name"] == "host")
        metric, label = re.findall(r"^label_values\((\w+), (\w+)\)$", listed)[0]
        hosts = json.loads(get(f"{server}/api/v1/label/{label}/values?match[]={metric}"))["data"]
        assert hosts == ["node1", "node2"]
        first = until(lambda: answers('ALERTS{alertname="LivepatchNewFault"}'), 60)
        assert {alert["metric"]["kind"] for alert in first} == {"calls", "late"}
        rules = json.loads(get(f"{server}/api/v1/rules"))["data"]["groups"][0]["rules"]
        assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(
            (
                *("LivepatchPatchMissing", "LivepatchNewFault", "LivepatchVersionsMixed", "LivepatchNoProcess"),
                *("livepatch:serving_hosts", "LivepatchPodUnpatched", "LivepatchNothingReported"),
            ),
            "ok",
        )


def test_promtool_accepts_the_alerts_and_each_fires_when_it_should(tmp_path: Path) -> None:
    promtool = debian.needed("promtool")
    shutil.copy(ALERTS, tmp_path / "alerts.yml")
    shutil.copy(Path(__file__).parent / "alerts_test.yml", tmp_path)
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        checked = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_and_dashboard_ask_for_metrics_that_there_are(state: Path) -> None:
    there = {name for name, _ in samples(page(state))}
    asked = {name for text in (*expressions(), ALERTS.read_text("utf-8")) for name in OURS.findall(text)}
    assert asked == there


def test_the_dashboards_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in own) < 24
        assert not own & taken
        taken |= own
