"""The dashboard against the types that Grafana publishes: nothing in it that they lack, and each value of its type.

Grafana itself is not run; what the panels ask is put to a real Prometheus in test_metrics.py.
"""

from __future__ import annotations

import copy
import enum
import json
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard, prometheus

from tests.unit.test_metrics import DASHBOARD

plugins.register_default_plugins()  # a panel's queries and options are those of its own types
FOUND: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))


def unfit(found: dict[str, Any]) -> list[str]:
    """What of a dashboard Grafana would not read, or not as it is meant."""
    return list(_lost(found, dashboard.Dashboard, "dashboard"))


def _lost(value: dict[str, Any], kind: Any, where: str) -> Iterator[str]:
    """A field that the type has not is left out by `from_json`, silently."""
    read = kind.from_json(value)
    yield from _differences(value, json.loads(encoder.JSONEncoder().encode(read)), where)
    for name, hint in typing.get_type_hints(type(read)).items():
        yield from _misfits(getattr(read, name), hint, f"{where}.{name}")


def _differences(before: Any, after: Any, where: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from _differences(value, after.get(name), f"{where}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {before!r} is read as {after!r}"


def _misfits(value: Any, hint: Any, where: str) -> Iterator[str]:
    """The library's `from_json` takes values as they are."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if hint in (object, typing.Any):
        return
    if origin in (typing.Union, types.UnionType):
        tried = [list(_misfits(value, one, where)) for one in of]
        yield from min(tried, key=len)
    elif origin is typing.Literal:
        if value not in of:
            yield f"{where}: {value!r} is none of {of}"
    elif origin in (list, dict):
        if not isinstance(value, origin):
            yield f"{where}: {value!r} is no {origin.__name__}"
            return
        for key, one in value.items() if origin is dict else enumerate(value):
            yield from _misfits(one, of[-1], f"{where}[{key!r}]")
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in [one.value for one in hint]:
            yield f"{where}: {value!r} is no {hint.__name__}"
    elif isinstance(value, dict) and hasattr(hint, "from_json"):  # some are left as they came
        yield from _lost(value, hint, where)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return
    elif not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        yield f"{where}: {value!r} is no {hint.__name__}"
    elif hasattr(value, "from_json"):
        for name, one in typing.get_type_hints(type(value)).items():
            yield from _misfits(getattr(value, name), one, f"{where}.{name}")


def test_grafana_s_types_take_the_dashboard() -> None:
    assert unfit(FOUND) == []
    read = dashboard.Dashboard.from_json(FOUND)
    queries = [query for panel in read.panels or () for query in panel.targets or ()]
    assert len(queries) >= len(FOUND["panels"]) > 5
    assert {type(query) for query in queries} == {prometheus.Dataquery}


def panel(found: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(one for one in found["panels"] if one["type"] == kind)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field that there is not": lambda found: found.update(refreshes="30s"),
    "a query that has none": lambda found: panel(found, "stat")["targets"][0].update(expression="up"),
    "a text for a number": lambda found: panel(found, "stat")["gridPos"].update(x="0"),
    "a number for a text": lambda found: panel(found, "timeseries").update(title=7),
    "a word that is none of its words": lambda found: panel(found, "table")["targets"][0].update(format="tables"),
    "a transformation without its name": lambda found: panel(found, "table")["transformations"][0].update(ids="x"),
    "a variable's field": lambda found: found["templating"]["list"][1].update(queries=""),
    "a variable's type": lambda found: found["templating"]["list"][1].update(type="queries"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_they_do_not_take_what_is_wrong(wrong: str) -> None:
    changed = copy.deepcopy(FOUND)
    WRONG[wrong](changed)
    assert len(unfit(changed)) > 0
