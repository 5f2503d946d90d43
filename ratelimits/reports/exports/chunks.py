"""Join texts into chunks of bytes, for all text formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: Minimum number of characters in each chunk except the last: about 150 lines.
SIZE = 65_536


def encoded(pieces: Iterable[str]) -> Iterator[bytes]:
    """Yield the pieces in UTF-8, joined into chunks. At most `SIZE` characters and one more piece are in memory."""
    pending: list[str] = []
    length = 0
    for piece in pieces:
        pending.append(piece)
        length += len(piece)
        if length >= SIZE:
            yield "".join(pending).encode()
            pending, length = [], 0
    if pending:
        yield "".join(pending).encode()
