"""Put an apostrophe in front of texts in a file, so that a spreadsheet does not read them as formulae."""

from __future__ import annotations

import re

#: Signs that start a formula. East Asian spreadsheets also accept the full-width forms.
SIGNS = "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
#: Characters that end a cell if the spreadsheet does not use the comma as separator, for a regular expression.
ENDS = ";|\\t\\r\\n"
_SET = re.escape(SIGNS)
#: Matches where a text needs an apostrophe: at its start or after a character of ENDS, if a formula follows.
_FORMULA = re.compile(f'^(?=[{_SET}\\t\\r\\n])|(?<=[{ENDS}])(?=[ "]*[{_SET}])')
#: Matches an apostrophe where `neutral` could have put one.
_MARK = re.compile(f"(?:^|(?<=[{ENDS}]))'(?='*[ \"]*[{_SET}\\t\\r\\n])")


def neutral(text: str) -> str:
    """Return a text with an apostrophe wherever a spreadsheet would see the start of a formula."""
    return _FORMULA.sub("'", text)


def restorable(text: str) -> str:
    """Return a text like `neutral`, which `restored` can undo: an apostrophe that was there before is doubled."""
    return neutral(_MARK.sub("''", text))


def restored(text: str) -> str:
    """Return the original of a text that `restorable` returned."""
    return _MARK.sub("", text)
