"""A hunk is put where its lines stand, or nowhere."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_livepatch.sitecustomize.changes import Change, Hunk, HunkError, changed, contained, places
from vllm_livepatch.tools.diffs import reading

TEXT = "".join(f"line {number}\n" for number in range(1, 21))
HUNK = Hunk(9, ("line 9", "line 10", "line 11"), ("line 9", "ten", "line 11"))


def test_a_hunk_is_put_in_its_place() -> None:
    assert changed(TEXT, [HUNK]) == TEXT.replace("line 10\n", "ten\n")


@pytest.mark.parametrize("before", ["", "one line more\n", "x\n" * 1000])
def test_lines_that_moved_are_fine(before: str) -> None:
    assert changed(before + TEXT, [HUNK]) == before + TEXT.replace("line 10\n", "ten\n")


@pytest.mark.parametrize(
    ("old", "new"), [("line 9\n", "line nine\n"), ("line 10\n", ""), ("line 11\n", "line 11 \n"), ("line 9\n", "")]
)
def test_no_line_of_context_may_differ(old: str, new: str) -> None:
    text = TEXT.replace(old, new)
    with pytest.raises(HunkError, match=r"hunk 1 \(line 9\) finds its lines nowhere"):
        changed(text, [HUNK])


def test_of_several_places_only_the_named_one_is_taken() -> None:
    text = TEXT + TEXT
    assert changed(text, [HUNK]) == TEXT.replace("line 10\n", "ten\n") + TEXT
    second = Hunk(29, HUNK.old, HUNK.new)
    assert changed(text, [second]) == TEXT + TEXT.replace("line 10\n", "ten\n")


def test_of_several_places_that_all_moved_none_is_taken() -> None:
    with pytest.raises(HunkError, match=r"hunk 1 \(line 9\) finds its lines in 2 places: lines 10, 30"):
        changed("moved\n" + TEXT + TEXT, [HUNK])


def test_a_hunk_that_could_stand_twice_follows_the_one_before_it() -> None:
    text = "moved\nunique\n" + TEXT + TEXT
    first = Hunk(1, ("unique", "line 1"), ("UNIQUE", "line 1"))
    assert places(text, [first, Hunk(10, HUNK.old, HUNK.new)]) == [1, 10]
    assert places(text, [first, Hunk(30, HUNK.old, HUNK.new)]) == [1, 30]


def test_a_third_hunk_stands_behind_the_second() -> None:
    """Before it, its lines are there once more, and its line number names neither place."""
    hunks = [Hunk(1, ("a",), ("A",)), Hunk(2, ("x",), ("X",)), Hunk(9, ("x",), ("Y",))]
    assert changed("a\nx\nb\nx\n", hunks) == "A\nX\nb\nY\n"


def test_hunks_stand_one_behind_the_other() -> None:
    later = Hunk(3, ("line 3",), ("three",))
    assert changed(TEXT, [later, HUNK]).count("ten") == 1
    with pytest.raises(HunkError, match="hunk 2"):
        changed(TEXT, [HUNK, later])
    with pytest.raises(HunkError, match="hunk 2"):
        changed(TEXT, [HUNK, HUNK])


def test_a_hunk_without_old_lines_stands_only_in_an_empty_text() -> None:
    hunk = Hunk(0, (), ("first",))
    assert changed("", [hunk]) == "first\n"
    with pytest.raises(HunkError, match="without any context"):
        changed("something\n", [hunk])


def test_the_ends_of_a_text() -> None:
    assert changed(TEXT, [Hunk(1, ("line 1",), ("first",))]).startswith("first\nline 2\n")
    assert changed(TEXT, [Hunk(20, ("line 20",), ("last",))]).endswith("line 19\nlast\n")
    assert changed("only\n", [Hunk(1, ("only",), ())]) == ""
    assert changed("first\nlast", [Hunk(2, ("last",), ("LAST",))]) == "first\nLAST"


def test_what_is_there_already_is_seen() -> None:
    assert contained(changed(TEXT, [HUNK]), [HUNK])
    assert not contained(TEXT, [HUNK])
    assert not contained(changed(TEXT, [HUNK]), [HUNK, Hunk(15, ("line 15",), ("fifteen",))])


def test_a_change_survives_the_bundle() -> None:
    change = Change("vllm.a", (HUNK, Hunk(15, ("line 15",), ())), added=False, package=True)
    assert Change.from_json(change.to_json()) == change
    assert Change("vllm.b", (Hunk(1, (), ("x = 1", "")),), added=True).text == "x = 1\n"


# Few different lines, so that the same ones stand in many places.
texts = st.lists(st.sampled_from(["a", "b", "c", "", "    d", "e\x0c", "f\u2028"]), max_size=40)


@given(texts, texts, st.integers(0, 4))
def test_the_diff_of_two_texts_makes_one_of_the_other(old: list[str], new: list[str], context: int) -> None:
    """Whatever the lines: a diff with its right line numbers gives exactly the new text, and is contained in it."""
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
    lines = difflib.unified_diff(
        before.split("\n")[:-1], after.split("\n")[:-1], "a/vllm/x.py", "b/vllm/x.py", n=context, lineterm=""
    )
    text = "".join(f"{line}\n" for line in lines)
    if not text:
        assert before == after
        return
    (change,) = reading.parse(text.encode()).changes
    if all(hunk.old for hunk in change.hunks) or not before:
        assert changed(before, change.hunks) == after
    if all(hunk.new for hunk in change.hunks) or not after:
        assert contained(after, change.hunks)


@given(texts, st.integers(0, 39), st.integers(1, 3), st.sampled_from("abc"))
def test_what_one_hunk_does_is_undone_by_its_reverse(old: list[str], at: int, size: int, new: str) -> None:
    text = "".join(f"{line}\n" for line in old)
    taken = tuple(old[at : at + size])
    if not taken:
        return
    there = Hunk(at + 1, taken, (new, *taken))
    back = Hunk(at + 1, (new, *taken), taken)
    assert changed(changed(text, [there]), [back]) == text


def test_a_message_names_no_more_than_five_places() -> None:
    with pytest.raises(HunkError, match=r"in 6 places: lines 1, 2, 3, 4, 5$"):
        changed("x\n" * 6, [Hunk(9, ("x",), ("y",))])


def test_what_is_there_already_is_looked_for_where_the_hunks_before_have_moved_it() -> None:
    """The first hunk adds three lines; of the places that the second one's lines have, its number names one."""
    before = [f"a{number}" for number in range(10)] + ["same", "old", "same"] * 3
    hunks = [
        Hunk(2, ("a1", "a2"), ("a1", "b", "b", "b", "a2")),
        Hunk(14, ("same", "old", "same"), ("same", "new", "same")),
    ]
    text = "\n".join(before)
    after = changed(text, hunks).replace("old", "new")  # the others stand there as changed
    assert contained(after, hunks)
    assert not contained(text, hunks)


def test_a_change_is_of_a_module_that_is_there_and_no_package() -> None:
    change = Change("engine.a", ())
    assert (change.added, change.package) == (False, False)
