"""Put an apostrophe before a text in a file, so that a spreadsheet does not read the text as a formula."""

from __future__ import annotations

import re

#: Signs that start a formula. Spreadsheets in East Asia also accept the full-width forms of these signs.
SIGNS = "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
#: Separators of cells in spreadsheets that do not separate cells by commas. They are escaped for a regular expression.
ENDS = ";|\\t\\r\\n"
_SIGNS_PATTERN = re.escape(SIGNS)
#: Matches the places where a text needs an apostrophe: the start of the text, if a sign, a tab or a line break follows;
#: and the place after a character of `ENDS`, if a sign follows there, directly or after spaces and quotes.
_FORMULA = re.compile(f'^(?=[{_SIGNS_PATTERN}\\t\\r\\n])|(?<=[{ENDS}])(?=[ "]*[{_SIGNS_PATTERN}])')
#: Matches an apostrophe at a place where `neutral` could have put an apostrophe.
_MARK = re.compile(f"(?:^|(?<=[{ENDS}]))'(?='*[ \"]*[{_SIGNS_PATTERN}\\t\\r\\n])")


def neutral(text: str) -> str:
    """Return a text with an apostrophe before each place where a spreadsheet would see the start of a formula."""
    return _FORMULA.sub("'", text)


def restorable(text: str) -> str:
    """Return a text with the apostrophes of `neutral`. From it, `restored` can make the original text again.

    If the original text already has an apostrophe at such a place, the result has two apostrophes there.
    """
    return neutral(_MARK.sub("''", text))


def restored(text: str) -> str:
    """Return the text from which `restorable` made this text."""
    return _MARK.sub("", text)
