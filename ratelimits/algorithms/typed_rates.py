"""Read lengths of time and rates that people type: "1 day", "5 min", "10/5min", "100 per hour", "50 a minute".

For any other text, `seconds` and `rate` raise Mistyped with a message that says what to write instead.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from ratelimits.algorithms import typed_numbers
from ratelimits.algorithms.base import gettext_noop
from ratelimits.algorithms.typed_numbers import MAX_TEXT, PLAIN, Mistyped, Notation

_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    # Django REST framework and django-ratelimit read "m" as a minute too. A month is not a length of time here.
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 604_800),
}
#: A number, perhaps with signs between its digits.
_DIGITS = r"[0-9]++(?:[.,\s'’][0-9]++)*+"
#: A number and its unit of time, such as "1.5 h".
_PART = re.compile(rf"\s*+({_DIGITS})\s*+([a-z]++)")
#: A number alone, and one with an exponent of at most two digits, as Python writes some decimals.
_NUMBER = re.compile(rf"[+-]?(?:{_DIGITS}|[.,][0-9]++)")
_WITH_EXPONENT = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)e[+-]?[0-9]{1,2}")
#: A word for what is counted, such as "requests" in "50 requests a minute".
_COUNTED = re.compile(r"\b(?:requests?|calls?|hits?|tokens?|permits?|units?|times)\Z")
#: What stands between the permits and the length of time, as in "50 requests per minute" or "10/5min".
_PER = re.compile(r"/|\b(?:per|an?|each|every|in|within)\b")
_MONTHS_OR_YEARS = re.compile(r"[0-9. ]*(?:months?|years?)")
#: `length_and_unit` writes a length of this number of seconds or more in seconds. The reason is that `Decimal` divides
#: exactly only numbers with at most 28 digits.
_MAX_LENGTH = Decimal(10) ** 20
_WRONG_LENGTH = gettext_noop(
    "“%(text)s” is not a length of time: write seconds, such as 60, or a number and s, m, min, h, d, day or week."
)
_WRONG_RATE = gettext_noop(
    "“%(text)s” is not a rate: write a number, a slash and a length of time, such as 10/s, 10/m or 10/min, 10/h, 10/d,"
    " 10/week or 10/5min."
)
_NO_FIXED_LENGTH = gettext_noop(
    "“%(text)s” is not a rate: months and years have no fixed length. Choose the algorithm calendar window, or write"
    " days, such as 1000/30 days."
)


class TypedRate(NamedTuple):
    """A typed rate: the number of permits, and the period in seconds."""

    permits: Decimal
    period: Decimal


def seconds(text: str, notation: Notation = PLAIN) -> Decimal:
    """Return the number of seconds for a text such as "90", "1.5 h", "5 m" (five minutes) or "1 day 12 h".

    `notation` says how the numbers are written. Raise Mistyped for any other text.
    """
    plain = _plain(text)
    if _is_number(plain):
        return _number(plain, text, notation, _WRONG_LENGTH)
    total, position = Decimal(0), 0
    while part := _PART.match(plain, position):
        count, unit = part.groups()
        if unit not in _SECONDS:
            break
        total += _number(count, text, notation, _WRONG_LENGTH) * _SECONDS[unit]
        position = part.end()
    if not plain or position < len(plain):
        raise Mistyped(_WRONG_LENGTH, text)
    return total


def _is_number(plain: str) -> bool:
    return bool(_NUMBER.fullmatch(plain) or _WITH_EXPONENT.fullmatch(plain))


def _number(digits: str, text: str, notation: Notation, otherwise: str) -> Decimal:
    """Return a number in a text. If it can be two numbers, the error says so; else its message is `otherwise`."""
    if _WITH_EXPONENT.fullmatch(digits):
        return Decimal(digits)
    try:
        return typed_numbers.decimal(digits, notation)
    except Mistyped as error:
        raise (error if error.is_ambiguous else Mistyped(otherwise, text)) from error


def _plain(text: str) -> str:
    """Return the text in small letters, without spaces around it; "" if it is too long."""
    plain = text.strip()
    return plain.lower() if len(plain) <= MAX_TEXT else ""


def is_rate(text: str) -> bool:
    """Return whether a text looks like a rate: it contains a slash, or a word such as "per" or "a"."""
    return _PER.search(_plain(text)) is not None


# The results are cached, because a throttle class parses its rate at each request.
@lru_cache(maxsize=1024)
def rate(text: str, notation: Notation = PLAIN) -> TypedRate:
    """Return the rate of a text such as "10/s", "10/m" (per minute), "100 per hour", "10/5min" or "50 calls a minute".

    `notation` says how the numbers are written. Raise Mistyped for any other text. This includes rates without a unit
    of time ("10", "10/60").
    """
    plain = _plain(text)
    found = _PER.search(plain)
    if found is None:
        raise Mistyped(_WRONG_RATE, text)
    permits, time = _COUNTED.sub("", plain[: found.start()].rstrip()).rstrip(), plain[found.end() :].lstrip()
    if not _is_number(permits) or _is_number(time):
        raise Mistyped(_WRONG_RATE, text)
    if _MONTHS_OR_YEARS.fullmatch(time):
        raise Mistyped(_NO_FIXED_LENGTH, text)
    try:
        period = seconds(f"1 {time}" if time in _SECONDS else time, notation)
    except Mistyped as error:
        raise (error if error.is_ambiguous else Mistyped(_WRONG_RATE, text)) from error
    return TypedRate(_number(permits, text, notation, _WRONG_RATE), period)


def length_and_unit(length: Decimal, notation: Notation = PLAIN) -> tuple[str, str]:
    """Return a length in seconds as a number and a unit: "s", "min", "h", "day" or "week".

    The function `seconds` can read the number and the unit together, such as "90 min".
    """
    for size, unit in ((604_800, "week"), (86_400, "day"), (3_600, "h"), (60, "min")):
        # Write weeks only for exactly one week, because people say "14 days" and not "2 weeks".
        if 0 < length < _MAX_LENGTH and not length % size and (unit != "week" or length == size):
            return f"{length // size:f}", unit
    return typed_numbers.written(length, notation), "s"
