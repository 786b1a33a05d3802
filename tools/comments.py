"""What of a Python module is code: two texts that differ in comments and docstrings alone are the same."""

from __future__ import annotations

import ast
import io
import tokenize

Place = tuple[int, int]
"""A line, counted from 1, and how many characters of it stand before."""


def left_out(text: str) -> str:
    """The module's lines without comments and docstrings, and the spaces before these. Lines stay where they are.

    Raises SyntaxError, tokenize.TokenError.
    """
    lines = text.split("\n")
    for (first, start), (last, end) in sorted([*_comments(text), *_docstrings(text)], reverse=True):
        before, after = lines[first - 1][:start], lines[last - 1][end:]
        lines[first - 1 : last] = [before, *[""] * (last - first)]
        lines[last - 1] += after
        lines[first - 1] = lines[first - 1].rstrip()
    return "\n".join(lines)


def _comments(text: str) -> list[tuple[Place, Place]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start, token.end) for token in tokens if token.type == tokenize.COMMENT]


def _docstrings(text: str) -> list[tuple[Place, Place]]:
    """Those of the module, its classes and functions, and strings that stand alone, as below an attribute."""
    found = []
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            # ast counts bytes of UTF-8.
            first, last = node.lineno, node.end_lineno or node.lineno
            start = len(lines[first - 1].encode()[: node.col_offset].decode())
            end = len(lines[last - 1].encode()[: node.end_col_offset].decode())
            found.append(((first, start), (last, end)))
    return found
