"""No process hangs whose threads import targets and standard modules at once. `import_hangs` counts many more starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit import import_hangs, interpreters


@pytest.mark.parametrize("way", import_hangs.WAYS)
@pytest.mark.parametrize("version", interpreters.found(interpreters.SERVED))
def test_no_start_hangs(tmp_path: Path, version: str, way: str) -> None:
    place = import_hangs.sandbox(tmp_path / "sandbox")
    wrong = [import_hangs.start(place, version, way, number) for number in range(3)]
    assert [said for said in wrong if said] == []
