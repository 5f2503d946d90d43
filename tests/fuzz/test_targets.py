"""Test that all bytes from outside are read, or refused by a known error. `python -m tests.fuzz` does more."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import TARGETS, Target

#: Inputs for each target.
INPUTS = 200
_PIECES = (
    b"",
    b"\0",
    b"\xff",
    b'"',
    b"{",
    b"[[",
    b"1e999",
    b"-1",
    b"NaN",
    b"\xed\xa0\x80",
    b"9" * 30,
    b"\n",
    b"|",
    b":",
)


def changed(rng: random.Random, text: bytes) -> bytes:
    """Return the text with some places cut out, doubled or replaced."""
    for _ in range(rng.randrange(1, 5)):
        start = rng.randrange(len(text) + 1)
        end = min(start + rng.randrange(6), len(text))
        piece = rng.choice((rng.choice(_PIECES), rng.randbytes(rng.randrange(4)), text[start:end] * 2))
        text = text[:start] + piece + text[end:]
    return text


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name.replace(" ", "_"))
def test_any_bytes_are_read_or_refused(target: Target) -> None:
    rng = random.Random(target.name)
    with target.around():
        for text in target.valid:
            target.read(text)
        for _ in range(INPUTS):
            target.feed(changed(rng, rng.choice(target.valid)))
        target.feed(b"")
        target.feed(b"[" * 100_000)
