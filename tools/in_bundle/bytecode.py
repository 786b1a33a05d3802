"""Whether the bytecode beside a source is that source's: Python runs it in the source's place.

What this Python wrote is compared with what this Python makes of the source. What another one wrote (its first four
bytes say so) cannot be compared here: it must have the source's time and size, which prove nothing. Line tables do not
count: they are shorter under `-X no_debug_ranges`.
"""

from __future__ import annotations

import marshal
import platform
import re
import struct
from importlib.util import MAGIC_NUMBER

from ...sitecustomize.executed_text import is_same_code

_LEVEL = re.compile(r"\.opt-([12])\.pyc$")
_ALWAYS = b"\1\0\0\0"
"""The flags of bytecode that runs unchecked, also when its source has been replaced."""


def is_foreign(data: bytes) -> bool:
    """Whether another Python wrote it."""
    return data[:4] != MAGIC_NUMBER


def wrong(name: str, data: bytes, source: bytes, modified: int) -> str:
    """What is wrong with it, '' where nothing is. `modified` is the source's time, in seconds."""
    if is_foreign(data):
        stamp = struct.pack("<II", modified & 0xFFFFFFFF, len(source) & 0xFFFFFFFF)
        current = data[4:16] == b"\0\0\0\0" + stamp or data[4:8] == stamp[:4]  # from Python 3.7 on; before
        return "" if current else "is bytecode of another Python, and not of this source"
    if data[4:8] == _ALWAYS:
        return "is bytecode that runs whatever its source is"
    level = _LEVEL.search(name)
    try:
        compiled = compile(source, "", "exec", dont_inherit=True, optimize=int(level[1]) if level else 0)
        same = is_same_code(marshal.loads(data[16:]), compiled)
    except Exception:  # of bytes that are no bytecode, any may come
        same = False
    return "" if same else f"is bytecode, and not what Python {platform.python_version()} makes of its source"
