"""Edits of code that proofs are to tell apart: what each form changes, and that it says when it changes nothing."""

from __future__ import annotations

import pytest
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.upkeep import edited

SOURCE = '''
class Pool:
    """Blocks."""

    @staticmethod
    def free(blocks, kept):
        """Give them back."""
        if kept:
            return 0
        for block in blocks:
            block.count -= 1
        return len(blocks)

    other = 1
'''


def made(source: str, name: str, **form: object) -> str:
    text = edited.edited(source, name, edited._change({"patch": "a", **form}))
    assert text is not None
    return text


def free(source: str, *given: object) -> object:
    names: dict[str, object] = {}
    exec(source, names)
    return names["Pool"].free(*given)  # type: ignore[attr-defined]


class Block:
    count = 1


def test_forms() -> None:
    def after(kept: bool = False, **form: object) -> tuple[object, int]:
        block = Block()
        text = made(SOURCE, "Pool.free", **form)
        assert text.splitlines()[-1] == "    other = 1"
        return free(text, [block], kept), block.count

    assert after(begin="more = None") == (1, 0)
    assert after(begin="blocks = []") == (0, 1)
    assert after(instead="return 7") == (7, 1)
    assert after(drop="count") == (1, 1)
    assert after(twice="count") == (1, -1)
    assert after(negate="kept") == (0, 1)
    assert after(negate="kept", kept=True) == (1, 0)
    assert after(rename=["blocks", "given"]) == (1, 0)
    parameter = edited.edited(SOURCE, "Pool.free", edited._parameter)
    assert parameter is not None
    assert "one_more=None" in parameter
    assert free(parameter, [Block()], False) == 1


@pytest.mark.parametrize("form", [{"drop": "other"}, {"twice": "other"}, {"negate": "blocks"}, {"rename": ["x", "y"]}])
def test_nothing_to_edit(form: dict[str, object]) -> None:
    assert edited.edited(SOURCE, "Pool.free", edited._change({"patch": "a", **form})) is None
    assert edited.edited(SOURCE, "Pool.other", edited._change({"patch": "a", "begin": "x = 1"})) is None


def test_one_form() -> None:
    with pytest.raises(UserError, match="a: an edit has one of begin, instead, drop"):
        edited._change({"patch": "a", "drop": "b", "twice": "b"})


def test_each_edit_of_the_table_is_of_a_patch() -> None:
    """Two harmless ones come beside the table's, for each patch that is no diff."""
    entries = catalogue.load()
    found = list(edited.edits(entries))
    assert {edit.patch for edit in found} == {name for name, entry in entries.items() if not entry.patch.diff}
    assert {edit.kind for edit in found} <= {"broken", "harmless"}


def test_table() -> None:
    broken = edited.Edit("a", "broken", "", ("b:c",), lambda _: True)
    harmless = edited.Edit("a", "harmless", "", ("b:c",), lambda _: True)
    assert edited.table([(harmless, "proven"), (broken, "refused"), (broken, "proven")]).splitlines() == [
        "| edits | of them | proven | refused |",
        "|---|---|---|---|",
        "| broken | 2 | 1 | 1 |",
        "| harmless | 1 | 1 |  |",
    ]
