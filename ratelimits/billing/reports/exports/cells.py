"""Write values as cells of an Excel sheet: make the text that follows `<c r="A1" s="1"` in the sheet's XML."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ratelimits.usage.periods import SECOND, iso

#: A function that writes a value.
Writer = Callable[[Any], str]

#: Maximum length of a cell, in UTF-16 code units.
MAX_CELL = 32_767
#: What stands at the end of a text that was cut.
_CUT = " … (cut: the CSV has all of it)"
#: Spreadsheets keep 15 digits of a number. A longer number is written as text.
_DIGITS = 15
_DAY = 86_400 * SECOND
#: 1970-01-01 as the number of a day in a spreadsheet.
_EPOCH = 25_569
#: Moments (µs since 1970 UTC): 1901-07-22, and the end of the year 9999. From _FIRST on and before _LAST, all
#: spreadsheets give a moment the same date.
_FIRST, _LAST = -25_000 * _DAY, 2_932_897 * _DAY
#: Characters that XML cannot contain, except control characters.
_NOT_IN_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")
#: Control characters except tab and line feed. A cell contains their codes instead, such as _x000D_.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")
#: Texts that a spreadsheet reads as the code of a character.
_CODE = re.compile("(_x[0-9a-fA-F]{4}_)")
#: A quick test. It matches each text that must be changed, and few other texts.
_SUSPECT = re.compile("[&<>\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]|_x")


def text(value: str) -> str:
    """Write a text. An empty text gives no cell."""
    if not value:
        return ""
    if len(value) * 2 > MAX_CELL:  # A character has at most two code units, so a shorter text fits.
        value = _fitting(value)
    if _SUSPECT.search(value):
        value = _escaped(value)
    keep_spaces = ' xml:space="preserve"' if value[0].isspace() or value[-1].isspace() else ""
    return f' t="inlineStr"><is><t{keep_spaces}>{value}</t></is></c>'


def _escaped(value: str) -> str:
    value = _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", value)
    # _x005F_ is the code of "_". So a spreadsheet shows a text such as "_x000D_" as it is, and does not decode it.
    value = _CODE.sub(r"_x005F\1", value)
    value = _CONTROL.sub(lambda found: f"_x{ord(found[0]):04X}_", value)
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _fitting(value: str) -> str:
    """Return the text. If it does not fit in a cell, return its beginning, with a note that it was cut."""
    # Each code unit of UTF-16 has two bytes.
    as_bytes = value.encode("utf-16-le", "surrogatepass")
    if len(as_bytes) <= 2 * MAX_CELL:
        return value
    return as_bytes[: 2 * (MAX_CELL - len(_CUT))].decode("utf-16-le", "ignore") + _CUT


def number(value: int) -> str:
    """Write a whole number."""
    return f"><v>{value}</v></c>" if abs(value) < 10**_DIGITS else text(str(value))


def decimal(value: str) -> str:
    """Write a decimal from its text. If the text is "", the decimal is not known, and the cell stays empty."""
    digits = value.removeprefix("-").replace(".", "", 1)
    if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS:
        return f"><v>{float(value):.16G}</v></c>"
    return text(value)


def moment(microseconds: int) -> str:
    """Write a moment (µs since 1970 UTC) as a date, or as text if a spreadsheet would not show all of it."""
    if microseconds % SECOND == 0 and _FIRST <= microseconds < _LAST:
        return f"><v>{_EPOCH + microseconds / _DAY:.16G}</v></c>"
    return text(iso(microseconds))
