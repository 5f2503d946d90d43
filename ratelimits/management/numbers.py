"""Read the numbers that people type after a command."""

from __future__ import annotations

from argparse import ArgumentTypeError

from ratelimits.algorithms import typed_numbers


def whole_number(text: str) -> int:
    """Return a typed whole number. For a text that can be two numbers, the error says what to write instead."""
    try:
        return typed_numbers.whole(text)
    except typed_numbers.Mistyped as error:
        raise ArgumentTypeError(str(error)) from error
