"""Read the numbers of rules and lines exactly, and write durations in seconds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

SECOND = 1_000_000  # µs


def exact(data: dict[str, Any], field: str, default: Any = None) -> Fraction:
    """Return the decimal in `field`, exactly as written."""
    value = data.get(field)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{field} is missing")
    return number(value, field)


def number(value: Any, field: str) -> Fraction:
    """Return a JSON number as an exact fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError(f"{field} must be a number, not {value!r}")
    if isinstance(value, int):
        return Fraction(value)
    try:
        decimal = Decimal(repr(value)) if isinstance(value, float) else value
    except InvalidOperation:
        raise ValueError(f"{field} must be a number, not {value!r}") from None
    if not decimal.is_finite():
        raise ValueError(f"{field} must be a finite number, not {value!r}")
    return Fraction(decimal)


def whole(data: dict[str, Any], field: str, least: int, default: int | None = None) -> int:
    """Return the whole number in `field`, at least `least`."""
    value = exact(data, field, default)
    if value.denominator != 1 or value < least:
        raise ValueError(f"{field} must be a whole number of at least {least}, not {data.get(field)!r}")
    return int(value)


def six_places(data: dict[str, Any], field: str, default: Any = None, *, zero: bool = False) -> Fraction:
    """Return a decimal above 0 (or with `zero` from 0) with at most six places."""
    value = exact(data, field, default)
    if value < 0 or (value == 0 and not zero):
        raise ValueError(f"{field} must be above 0, not {data.get(field)!r}")
    if (value * 10**6).denominator != 1:
        raise ValueError(f"{field} has more than six places: {data.get(field)!r}")
    return value


def duration(data: dict[str, Any], field: str, default: Any = None) -> int:
    """Return seconds with at most six places, in µs."""
    return int(six_places(data, field, default) * SECOND)


def nearest(value: Fraction) -> int:
    """Return seconds rounded to the nearest µs, halves up."""
    return (value * SECOND * 2 + 1).__floor__() // 2


def seconds(us: int) -> float:
    """Return µs as the closest JSON number of seconds."""
    return us / SECOND
