"""Check numbers that people write: exact decimals, whole numbers, lengths of time.

For a value that is not valid, the functions raise ValueError with a sentence that says what to write instead. The
sentence begins with `name`, the name of the field.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

#: Microseconds in a second.
MICROSECONDS = 1_000_000
#: Maximum length of a span in µs. The Lua script adds a span to the present moment. It calculates with doubles, and
#: doubles are exact for whole numbers up to 2**53.
HORIZON = 2**52
#: Maximum capacity. No other number of a rule can be larger.
MAX_PERMITS = 10**12


def exact(name: str, value: object, minimum: Decimal | int = 0, *, above: bool = False) -> Decimal:
    """Return a value as a decimal with at most six places.

    The value must be from `minimum` to MAX_PERMITS. If `above` is true, it must be above `minimum`.
    """
    try:
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise InvalidOperation  # Decimal would accept "1_0" and digits of other writing systems
        number = value if isinstance(value, Decimal) else Decimal(str(value))
    except (InvalidOperation, ValueError) as error:
        raise ValueError(f"{name} must be a number, not {value!r}") from error
    if isinstance(value, bool) or not number.is_finite():
        raise ValueError(f"{name} must be a number, not {value if isinstance(value, Decimal) else repr(value)}")
    if number < minimum or (above and number == minimum):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {minimum}, not {number}")
    if number > MAX_PERMITS:
        raise ValueError(f"{name} must be at most {MAX_PERMITS}, not {number}")
    if number != round(number, 6):
        raise ValueError(f"{name} has more than six decimal places: write {round(number, 6).normalize():f}")
    return number


def whole(name: str, value: object, minimum: int = 0, maximum: int = MAX_PERMITS) -> int:
    """Return a value as a whole number. It must be from `minimum` to `maximum`."""
    number = exact(name, value)
    if number % 1:
        raise ValueError(f"{name} must be a whole number, not {value}")
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} must be from {minimum} to {maximum}, not {number}")
    return int(number)


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return a value as a str. It must be one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def micros(seconds: Decimal) -> int:
    """Return a length of time in seconds as whole µs."""
    return int(seconds * MICROSECONDS)


def length(name: str, value: object) -> Decimal:
    """Return a length of time in seconds. It must be above 0 and at most HORIZON, which is in µs."""
    seconds = exact(name, value, above=True)
    if micros(seconds) > HORIZON:
        raise ValueError(f"{name} is longer than 142 years: write a shorter one")
    return seconds
