"""Texts in files that a spreadsheet opens: an apostrophe keeps a text from being read as a formula."""

from __future__ import annotations

import re

#: Signs that start a formula. East Asian spreadsheets also accept the full-width forms.
SIGNS = "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
#: Characters that end a cell if the spreadsheet does not use the comma as separator; for a set of a pattern.
ENDS = ";|\\t\\r\\n"
_SET = re.escape(SIGNS)
#: Matches where a text needs an apostrophe: at its start or after a character of ENDS, if a formula follows.
_FORMULA = re.compile(f'^(?=[{_SET}\\t\\r\\n])|(?<=[{ENDS}])(?=[ "]*[{_SET}])')
#: Matches an apostrophe that looks like an added one.
_MARK = re.compile(f"(?:^|(?<=[{ENDS}]))'(?='*[ \"]*[{_SET}\\t\\r\\n])")


def neutral(text: str) -> str:
    """Return a text with an apostrophe wherever a spreadsheet would see the start of a formula."""
    return _FORMULA.sub("'", text)


def restorable(text: str) -> str:
    """Return a text like `neutral`, from which `restored` can tell: an apostrophe of the text's own is doubled."""
    return neutral(_MARK.sub("''", text))


def restored(text: str) -> str:
    """Return the text that `restorable` was given."""
    return _MARK.sub("", text)
