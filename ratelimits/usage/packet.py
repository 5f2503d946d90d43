"""A sealed batch read from Redis: its fields checked and put together to lines, with a digest the ledger can repeat."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote_to_bytes
from zlib import crc32

from ratelimits.models.ledger import Batch

CUM_MODULUS = 10**15
LONGEST_TEXT = 255
_LARGEST = 2**63 - 1

_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")
# Which counters a field adds to, by its kind and by what it counts.
_PLACES = {
    f"{kind}{count}".encode(): places
    for number, kind in enumerate("adrs")
    for count, places in (("1", (2 * number, 2 * number + 1)), ("n", (2 * number,)), ("u", (2 * number + 1,)))
}
_CONTROL = re.compile(rb"[\x00-\x1f]")
_ZEROS = b"\t0" * 6


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
    lines: tuple[bytes, ...]
    content: str


def escaped(text: str) -> str:
    """Text as it stands in a canonical line (and in PostgreSQL's COPY format)."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def unescaped(text: str) -> str:
    """The inverse of `escaped`."""
    if "\\" not in text:
        return text
    return re.sub(r"\\(.)", lambda found: {"t": "\t", "n": "\n", "r": "\r"}.get(found[1], found[1]), text)


def canonical(values: Sequence[str | int]) -> bytes:
    """A line as it is digested: SUBJECT, then COUNTERS, separated by tabs."""
    return "\t".join([escaped(value) if isinstance(value, str) else str(value) for value in values]).encode()


def checksum(line: bytes) -> int:
    """The CRC-32 of a canonical line."""
    return crc32(line)


def content_digester(header: Sequence[str | int]) -> hashlib._Hash:
    """A digest that has a batch's identity, to be updated with a line feed and a canonical line for each."""
    return hashlib.sha256(canonical(header))


def content_digest(header: Sequence[str | int], lines: Sequence[bytes]) -> str:
    """SHA-256 over the identity of a batch and its canonical lines, in hexadecimal."""
    digest = content_digester(header)
    digest.update(b"\n".join([b"", *lines]))
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


def _text(raw: bytes) -> bytes:
    # PostgreSQL keeps no NUL.
    text = unquote_to_bytes(raw).decode(errors="replace").replace("\0", "\ufffd")
    if len(text) > LONGEST_TEXT:
        raise Unreadable(f"a name is longer than {LONGEST_TEXT} characters: {text[:40]}…")
    return escaped(text).encode()


def _counted(fields: Iterable[tuple[bytes, bytes]], identity: dict[bytes, bytes]) -> dict[bytes, list[int]]:
    """Counts by what is between a field's kind and what it counts; `identity` takes the fields of the batch itself."""
    rows: dict[bytes, list[int]] = {}
    find = rows.get
    for name, value in fields:
        places = _PLACES.get(name[:1] + name[-1:])
        if places is None:
            if name[:1] != b"#":
                raise Unreadable(f"a field of an unknown kind: {name[:200]!r}")
            identity[name] = value
            continue
        if not value.isdigit():
            raise Unreadable(f"the field {name[:200]!r} holds {value[:40]!r}, no whole number")
        about = name[1:-1]
        row = find(about)
        if row is None:
            row = rows[about] = [0, 0, 0, 0, 0, 0, 0, 0]
        count = int(value)
        for place in places:
            row[place] += count
    return rows


def _subjects(rows: Iterable[bytes]) -> Iterator[bytes]:
    """What each of "|bin|period|meter|rule|version|account|key|" is as a line begins; Unreadable if one is not that."""
    sound: set[bytes] = set()  # numbers come again and again
    for raw in rows:
        parts = raw.split(b"|")
        if len(parts) != 9 or parts[0] or parts[8] or b"#" in raw:
            raise Unreadable(f"a field is not bin|period|meter|rule|version|account|key: {raw[:200]!r}")
        _, bin_, period, meter, rule, version, account, key, _ = parts
        if not (bin_ in sound and period in sound and rule in sound and version in sound):
            for number in (bin_, period, rule, version):
                if _NUMBER.fullmatch(number) is None:
                    raise Unreadable(f"a field has {number[:40]!r} where a number belongs: {raw[:200]!r}")
                sound.add(number)
        if b"%" in raw or b"\\" in raw or len(raw) > LONGEST_TEXT or not raw.isascii() or _CONTROL.search(raw):
            meter, account, key = _text(meter), _text(account), _text(key)
        yield b"\t".join((account, key, meter, rule, version, period, bin_))


def _lines(counted: dict[bytes, list[int]]) -> list[bytes]:
    """The canonical lines of a batch, sorted."""
    rows: dict[bytes, list[int]] = {}
    for subject, counts in zip(_subjects(counted), counted.values(), strict=True):
        held = rows.get(subject)
        # Two names can be one once they are decoded.
        rows[subject] = counts if held is None else [one + other for one, other in zip(held, counts, strict=True)]
    return sorted(
        [
            b"%b\t%d\t%d%b" % (subject, counts[0], counts[1], _ZEROS)
            if not any(counts[2:])
            else b"\t".join([subject, *[b"%d" % count for count in counts]])
            for subject, counts in rows.items()
        ]
    )


def packet(shard: int, fields: Iterable[tuple[bytes, bytes]]) -> Packet:
    """The batch that these fields of its hash are; Unreadable if they are not all of one, with sums that hold."""
    identity: dict[bytes, bytes] = {}
    counted = _counted(fields, identity)
    try:
        incarnation, run, sealed_run, follows = (identity[name].decode() for name in (b"#i", b"#r", b"#x", b"#f"))
        seq, before, cum, opened_at, sealed_at = (int(identity[name]) for name in (b"#s", b"#p", b"#c", b"#o", b"#t"))
    except KeyError as error:
        raise Unreadable(f"the batch lacks its {error.args[0].decode()}") from error
    except ValueError as error:
        raise Unreadable(f"the batch's identity cannot be read: {error}") from error
    lines = _lines(counted)
    total = sum(map(sum, counted.values()))
    if (before + total) % CUM_MODULUS != cum:
        raise Unreadable(f"the running sum was {before}, the counters add {total}, but it became {cum}")
    if total > _LARGEST and any(max(counts) > _LARGEST for counts in counted.values()):
        raise Unreadable("a counter is larger than 64 bits hold")
    read = Packet(
        shard, incarnation, seq, before, cum, opened_at, sealed_at, run, sealed_run, follows, tuple(lines), ""
    )
    return replace(read, content=content_digest(header_of(read), lines))


def values(line: bytes) -> list[str]:
    """The values of a canonical line as texts: databases take numbers so too."""
    parts = line.decode().split("\t")
    if b"\\" in line:
        parts[:3] = map(unescaped, parts[:3])
    return parts
