"""A sealed batch read from Redis: its fields checked and put together to lines, with a digest the ledger can repeat."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote_to_bytes
from zlib import crc32

from ratelimits.models.ledger import Batch

CUM_MODULUS = 10**15
LONGEST_TEXT = 255
_LARGEST = 2**63 - 1

_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_TEXT = rb"([^|#]*)"
# bin|period|meter|rule|version|account|key, between the kind in front and the 1, n or u behind.
_SUBJECT = re.compile(
    rb"\|" + rb"\|".join((_NUMBER, _NUMBER, _TEXT, _NUMBER, _NUMBER, _TEXT, _TEXT)) + rb"\|", re.DOTALL
)
# Which counters a field adds to, by its kind and by what it counts.
_PLACES = {
    (kind, count): places
    for number, kind in enumerate(b"adrs")
    for count, places in (
        (ord("1"), (2 * number, 2 * number + 1)),
        (ord("n"), (2 * number,)),
        (ord("u"), (2 * number + 1,)),
    )
}

_LINE = "%s" + "\t%d" * 8


class Unreadable(ValueError):
    """The batch is not what a seal leaves behind; the message says why."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A sealed batch, whole and checked. `lines` are canonical texts, sorted; moments are µs since 1970 UTC."""

    shard: int
    incarnation: str
    seq: int
    previous_cum: int
    cum: int
    opened_at: int
    sealed_at: int
    run: str
    sealed_run: str
    follows: str
    lines: tuple[str, ...]
    content: str


def escaped(text: str) -> str:
    """Text as it stands in a canonical line (and in PostgreSQL's COPY format)."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def unescaped(text: str) -> str:
    """The inverse of `escaped`."""
    if "\\" not in text:
        return text
    return re.sub(r"\\(.)", lambda found: {"t": "\t", "n": "\n", "r": "\r"}.get(found[1], found[1]), text)


def canonical(values: Sequence[str | int]) -> str:
    """A line as it is digested: SUBJECT, then COUNTERS, separated by tabs."""
    return "\t".join([escaped(value) if isinstance(value, str) else str(value) for value in values])


def checksum(line: str) -> int:
    """The CRC-32 of a canonical line."""
    return crc32(line.encode())


def content_digester(header: Sequence[str | int]) -> hashlib._Hash:
    """A digest that has a batch's identity, to be updated with a line feed and a canonical line for each."""
    return hashlib.sha256(canonical(header).encode())


def content_digest(header: Sequence[str | int], lines: Iterable[str]) -> str:
    """SHA-256 over the identity of a batch and its canonical lines, in hexadecimal."""
    digest = content_digester(header)
    for line in lines:
        digest.update(b"\n" + line.encode())
    return digest.hexdigest()


def header_of(batch: Packet | Batch) -> tuple[str | int, ...]:
    """What is digested of a batch beside its lines."""
    return (
        "ratelimits batch 1",
        batch.shard,
        batch.incarnation,
        batch.seq,
        batch.previous_cum,
        batch.cum,
        batch.opened_at,
        batch.sealed_at,
        batch.run,
        batch.sealed_run,
        batch.follows,
    )


def chained(previous: str, content: str) -> str:
    """The next digest of a shard's chain."""
    return hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()


def _text(raw: bytes) -> str:
    # PostgreSQL keeps no NUL.
    text = unquote_to_bytes(raw).decode(errors="replace").replace("\0", "�")
    if len(text) > LONGEST_TEXT:
        raise Unreadable(f"a name is longer than {LONGEST_TEXT} characters: {text[:40]}…")
    return escaped(text)


def _subject(raw: bytes) -> str:
    found = _SUBJECT.fullmatch(raw)
    if found is None:
        raise Unreadable(f"a field is not bin|period|meter|rule|version|account|key: {raw[:200]!r}")
    bin_, period, meter, rule, version, account, key = found.groups()
    if b"%" in raw or len(raw) > LONGEST_TEXT or not raw.isascii():
        meter, account, key = (_text(part).encode() for part in (meter, account, key))
    return b"\t".join((account, key, meter, rule, version, period, bin_)).decode()


def _counted(fields: Iterable[tuple[bytes, bytes]], identity: dict[bytes, bytes]) -> dict[bytes, list[int]]:
    rows: dict[bytes, list[int]] = {}
    for name, value in fields:
        if name[:1] == b"#":
            identity[name] = value
            continue
        places = _PLACES.get((name[0], name[-1])) if len(name) > 2 else None
        if places is None:
            raise Unreadable(f"a field of an unknown kind: {name[:200]!r}")
        if not value.isdigit():
            raise Unreadable(f"the field {name[:200]!r} holds {value[:40]!r}, no whole number")
        row = rows.get(name[1:-1])
        if row is None:
            row = rows[name[1:-1]] = [0] * 8
        for place in places:
            row[place] += int(value)
    return rows


def packet(shard: int, fields: Iterable[tuple[bytes, bytes]]) -> Packet:
    """The batch that these fields of its hash are; Unreadable if they are not all of one, with sums that hold."""
    identity: dict[bytes, bytes] = {}
    counted = _counted(fields, identity)
    rows: dict[str, list[int]] = {}
    for raw, counts in counted.items():
        subject = _subject(raw)
        if subject in rows:
            rows[subject] = [sum(pair) for pair in zip(rows[subject], counts, strict=True)]
        else:
            rows[subject] = counts
    try:
        incarnation, run, sealed_run, follows = (identity[name].decode() for name in (b"#i", b"#r", b"#x", b"#f"))
        seq, before, cum, opened_at, sealed_at = (int(identity[name]) for name in (b"#s", b"#p", b"#c", b"#o", b"#t"))
    except KeyError as error:
        raise Unreadable(f"the batch lacks its {error.args[0].decode()}") from error
    except ValueError as error:
        raise Unreadable(f"the batch's identity cannot be read: {error}") from error
    total = sum(map(sum, rows.values()))
    if (before + total) % CUM_MODULUS != cum:
        raise Unreadable(f"the running sum was {before}, the counters add {total}, but it became {cum}")
    if any(max(counts) > _LARGEST for counts in rows.values()):
        raise Unreadable("a counter is larger than 64 bits hold")
    lines = sorted([_LINE % (subject, *counts) for subject, counts in rows.items()])
    read = Packet(
        shard, incarnation, seq, before, cum, opened_at, sealed_at, run, sealed_run, follows, tuple(lines), ""
    )
    return replace(read, content=content_digest(header_of(read), lines))


def values(line: str) -> list[str | int]:
    """The values of a canonical line, texts as they were."""
    parts = line.split("\t")
    return [*(unescaped(part) for part in parts[:3]), *map(int, parts[3:])]
