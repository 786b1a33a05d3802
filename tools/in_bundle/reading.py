"""A report as `status` takes it: of the form that processes write, and of nothing that a terminal would obey.

Others may write to a directory that is shared: what they leave there must not hide the reports beside it.
"""

from __future__ import annotations

import functools
import json
import re
from types import NoneType
from typing import Any

from ...sitecustomize.redaction import sentence, without_secrets

_TOO_LARGE = 2.0**63
STATES = ("applied", "armed", "skipped", "failed")
_MAYBE = (str, NoneType)
_PATCH = {
    "name": str,
    "state": STATES,
    "reason": _MAYBE,
    "detail": _MAYBE,
    "verdict": _MAYBE,
    "targets": [str],
    "counters": {...: int},
    "version": (int, NoneType),
}
_LATER = {
    "version": _MAYBE,
    "digest": _MAYBE,
    "settings": (dict, NoneType),
    "heartbeat": (int, float, NoneType),
    "pid_namespace": _MAYBE,
}
_FORM = {
    "pid": int,
    "host": str,
    "argv": [str],
    "python": _MAYBE,
    "started": str,
    "bundle": _MAYBE,
    "packages": {...: _MAYBE},
    "patches": [_PATCH],
    **_LATER,
}
_OPTIONAL = _LATER.keys()
"""Reports of version 0.1 lack them, and their patches a version."""
_OBEYED = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, and those that turn the direction of what follows; no new line and no tab."""
_BREAK = re.compile(r"[\n\t]")
_ESCAPED = re.compile(r"\\[bfnrtu]|\x7f")
"""In JSON of ASCII nothing else makes a character that is not printable."""

# The reports of a fleet repeat these: each text is looked through once, not once a process.
_sentence = functools.lru_cache(4096)(sentence)
_without_secrets = functools.lru_cache(1024)(lambda argv: without_secrets(argv))


def content_of(text: str) -> Any:
    """What a JSON text holds, its numbers as JSON and Prometheus have them: None for any other. Raises ValueError."""
    return _DECODER.decode(text)


def process_of(text: str, content: Any) -> dict[str, Any]:
    """The report of a process, without what it does not show. `content` is what its text, which is ASCII, holds.

    Raises ValueError for any other content.
    """
    odd = _ESCAPED.search(text) is not None
    content = _plain(content) if odd else content
    if not _is(content, _FORM):
        raise ValueError("not a report")
    # What is shown in a line of its own has none in it: `host` must not look like another process.
    process: dict[str, Any] = {
        key: _plain(content.get(key), _BREAK, " ") if odd and key != "argv" else content.get(key) for key in _FORM
    }
    process["patches"] = [{key: patch[key] for key in _PATCH if key in patch} for patch in process["patches"]]
    names = {patch["name"] for patch in process["patches"]}
    if len(names) < len(process["patches"]) or not _is((process["settings"] or {}).get("toggles"), (dict, NoneType)):
        raise ValueError("not a report")
    process["argv"] = [*_without_secrets(tuple(process["argv"]))]  # version 0.1 wrote them as they were
    for patch in process["patches"]:
        patch["detail"] = patch["detail"] and _sentence(patch["detail"])
    return process


def on_one_line(text: str) -> str:
    """A text as it can be shown."""
    return _BREAK.sub(" ", _OBEYED.sub("?", text))


def _is(value: Any, form: Any) -> bool:
    """Whether it has a form: types, certain words, a list of a form, a dictionary of forms or of one."""
    if form is STATES:
        return value in STATES
    if isinstance(form, (type, tuple)):
        return isinstance(value, form) and not isinstance(value, bool)
    if isinstance(form, list):
        return isinstance(value, list) and all(_is(part, form[0]) for part in value)
    if ... in form:
        return isinstance(value, dict) and all(_is(part, form[...]) for part in value.values())
    there = isinstance(value, dict) and form.keys() <= value.keys() | _OPTIONAL
    return there and all(_is(value.get(key), part) for key, part in form.items())


def _plain(value: Any, obeyed: re.Pattern[str] = _OBEYED, instead: str = "?") -> Any:
    """Text that can be printed."""
    if isinstance(value, dict):
        return {_plain(key, obeyed, instead): _plain(part, obeyed, instead) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, obeyed, instead) for part in value]
    return obeyed.sub(instead, value) if isinstance(value, str) else value


def _integer(text: str) -> int | None:
    return value if abs(value := int(text)) < _TOO_LARGE else None


def _fraction(text: str) -> float | None:
    return value if abs(value := float(text)) < _TOO_LARGE else None


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_fraction, parse_constant=lambda _: None)
