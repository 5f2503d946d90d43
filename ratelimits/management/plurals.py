"""Write numbers of things in the output of commands, such as "1 line" and "2,000 lines"."""

from __future__ import annotations


def plural(count: int, one: str, many: str = "") -> str:
    """Return a number with a noun in the singular or the plural. Without `many`, the plural of `one` ends with "s"."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def is_or_are(count: int) -> str:
    """Return the verb for a number of things."""
    return "is" if count == 1 else "are"
