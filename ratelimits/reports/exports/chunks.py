"""Pieces of text to chunks of bytes: what every text format streams through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: Characters that are gathered before they are given away, about 150 lines.
SIZE = 65_536


def encoded(pieces: Iterable[str]) -> Iterator[bytes]:
    """The pieces one after the other in UTF-8, in chunks; never holds more than SIZE characters and one piece."""
    held: list[str] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length >= SIZE:
            yield "".join(held).encode()
            held, length = [], 0
    if held:
        yield "".join(held).encode()
