"""A run by hand counts while the patch's code is as it was; what is written beside the code may change."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
from vllm_livepatch.tools import comments
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import matrix

TEXT = '''"""Of the module,
in two lines."""

import re  # why


class Held:
    """What is held."""

    count: int  # so many
    """Below an attribute."""

    def give(self) -> str:
        """One line, and é."""
        # alone
        é = "# no comment"; "a string"; return é + re.sub("a", """
# nor this
""", "b")  # the end
'''
CODE = """


import re


class Held:


    count: int


    def give(self) -> str:


        é = "# no comment"; ; return é + re.sub("a", \"\"\"
# nor this
\"\"\", "b")
"""


def test_comments_and_docstrings_are_left_out_and_lines_stay_where_they_are() -> None:
    assert comments.left_out(TEXT) == CODE


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        ("# alone", "# two\n        # lines", True),
        ("  # why", "", True),
        ('"""What is held."""', '"""What is not\n    given."""', True),
        ('        """One line, and é."""\n', "", True),
        ('"""What is held."""', '"""What is held."""  # and why', True),
        ("# no comment", "# not one", False),
        ("# nor this", "", False),
        ('"a", "', '"b", "', False),
        ("# nor this", "# nor this  ", False),  # spaces at the end of a line of a string
        ("-> str:", "-> str:\n        self.count += 1", False),
        ("-> str:", "-> str:\n        ...", False),  # no docstring: nothing is written there
        ("-> str:", "-> str:\n        b'bytes'", False),
    ],
)
def test_the_code_of_a_patch_is_not_what_is_written_about_it(was: str, now: str, same: bool, tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    shutil.copytree(catalogue.load()["failed-loads"].folder, stock, ignore=shutil.ignore_patterns("__pycache__"))
    (stock / "more.py").write_text(TEXT, "utf-8")
    changed = tmp_path / "changed"
    shutil.copytree(stock, changed)
    assert was in TEXT, "or nothing changes"
    text = TEXT.replace(was, now)
    ast.parse(text)
    (changed / "more.py").write_text(text, "utf-8")
    assert (matrix.code_of(changed) == matrix.code_of(stock)) is same


def test_no_code_is_left_out_of_any_patch() -> None:
    """Each statement's line has something left, but for those of docstrings."""
    for file in sorted(file for entry in catalogue.load().values() for file in entry.folder.glob("*.py")):
        text = file.read_text("utf-8")
        left = comments.left_out(text).split("\n")
        assert len(left) == len(text.split("\n")), file
        for node in ast.walk(ast.parse(text)):
            alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert alone or not isinstance(node, ast.stmt) or left[node.lineno - 1], (file, node.lineno)
