"""Change a text of the code, for the commands that show which tests notice the change."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def changed(source: str, text: str, instead: str, place: str) -> str:
    """Return `source` with `instead` in place of a text. Raise AssertionError if it does not have the text once.

    `place` says in the error where the source is from.
    """
    assert source.count(text) == 1, f"not once in {place}: {text}"
    return source.replace(text, instead)
