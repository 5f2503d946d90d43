"""Read numbers that people type. This is the only place that does so, for forms, files and commands.

The same text can be two numbers: "1.000" is 1 in English and 1000 in German. A text is read as the language of its
writer writes numbers. If it can still be two numbers, it is refused, and the message says what to write instead. So
"1.000", "1,000" and "1 000" are never read as 1.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from ratelimits.algorithms.base import gettext_noop

#: A longer text is no number. A message shows at most this many characters of a text.
MAX_TEXT = 100
#: Signs that can stand between thousands in every language: spaces and apostrophes. They never are a decimal sign.
_BETWEEN_THOUSANDS = " \u00a0\u2009\u202f'’"
#: Digits in groups of three, with one sign between the groups. A number does not begin with 0 then.
_GROUPS = re.compile(rf"[1-9][0-9]{{0,2}}([.,{_BETWEEN_THOUSANDS}])[0-9]{{3}}(?:\1[0-9]{{3}})*+")
_DIGITS = re.compile(r"[0-9]++")
_TWO_MEANINGS = gettext_noop("“%(text)s” can mean %(one)s or %(other)s: write one of these two.")
_WITHOUT_SEPARATORS = gettext_noop("“%(text)s” is not a number: write %(number)s, without separators.")
_NOT_A_NUMBER = gettext_noop("“%(text)s” is not a number: write digits, such as 1000 or %(example)s.")
_NOT_WHOLE = gettext_noop("“%(text)s” is not a whole number: write digits only, such as 1000.")


class Mistyped(ValueError):
    """Raised if a text cannot be read as a number, a length of time or a rate.

    The message is `template % values`. `template` can be translated. A text that is too long is not shown whole.
    """

    def __init__(self, template: str, text: str, **values: str) -> None:
        self.template = template
        self.values = {"text": text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…", **values}
        super().__init__(template % self.values)

    @property
    def is_ambiguous(self) -> bool:
        """Return whether the text is a number, but can be two numbers."""
        return self.template in (_TWO_MEANINGS, _WITHOUT_SEPARATORS)


class Notation(NamedTuple):
    """How a language writes numbers: its decimal sign, and the sign between thousands ("" if it has none)."""

    decimal: str
    thousands: str


#: The notation of files, commands and code. No sign between thousands is read but spaces and apostrophes.
PLAIN = Notation(".", "")


def written(value: Decimal | int, notation: Notation = PLAIN) -> str:
    """Return a number as a text that `decimal` reads as this number: without trailing zeros and without thousands."""
    # A format, and not `normalize`, because the context would round a long number.
    text = f"{value:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace(".", notation.decimal)


def decimal(text: str, notation: Notation = PLAIN) -> Decimal:
    """Return the number that a person means. Raise Mistyped with what to write instead if this is not certain."""
    typed = text.strip()
    sign, unsigned = (typed[0], typed[1:]) if typed[:1] in ("+", "-") else ("", typed)
    if len(typed) > MAX_TEXT:
        raise _not_a_number(text, notation)
    return Decimal(f"{sign}{_plain(unsigned, text, notation)}")


def whole(text: str, notation: Notation = PLAIN) -> int:
    """Return the whole number that a person means. Raise Mistyped with what to write instead if it is not certain."""
    try:
        value = decimal(text, notation)
    except Mistyped as error:
        raise (error if error.is_ambiguous else Mistyped(_NOT_WHOLE, text)) from error
    if value != value.to_integral_value():
        raise Mistyped(_NOT_WHOLE, text)
    return int(value)


def _plain(unsigned: str, text: str, notation: Notation) -> str:
    """Return a number without a sign as `Decimal` reads it. `text` is the whole text, for messages."""
    if _DIGITS.fullmatch(unsigned):
        return unsigned
    if grouped := _GROUPS.fullmatch(unsigned):
        between = grouped[1]
        if _is_between_thousands(between, notation):
            return unsigned.replace(between, "")
        parts = unsigned.split(between)
        if len(parts) > 2:
            raise Mistyped(_WITHOUT_SEPARATORS, text, number="".join(parts))
        # No form and no file of this app writes a number with a zero at the end of its places. So "1.125" is a decimal
        # in English, but "1.000" can be a German thousand.
        if between != notation.decimal or unsigned.endswith("0"):
            one = written(Decimal(".".join(parts)), notation)
            raise Mistyped(_TWO_MEANINGS, text, one=one, other="".join(parts))
        return ".".join(parts)
    head, sign, places = unsigned.rpartition(notation.decimal)
    if sign and _DIGITS.fullmatch(places or "0"):
        grouped = _GROUPS.fullmatch(head)
        if grouped and _is_between_thousands(grouped[1], notation):
            head = head.replace(grouped[1], "")
        if _DIGITS.fullmatch(head or "0") and (head or places):
            return f"{head or 0}.{places or 0}"
    # A point that cannot be between thousands is a decimal point in every language: "0.125", "1.5".
    head, sign, places = unsigned.partition(".")
    if sign and places and _DIGITS.fullmatch(f"{head}{places}"):
        return f"{head or 0}.{places}"
    raise _not_a_number(text, notation)


def _is_between_thousands(sign: str, notation: Notation) -> bool:
    return sign == notation.thousands or sign in _BETWEEN_THOUSANDS


def _not_a_number(text: str, notation: Notation) -> Mistyped:
    return Mistyped(_NOT_A_NUMBER, text, example=f"0{notation.decimal}5")
