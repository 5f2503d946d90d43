"""A sealed batch read from Redis: its fields checked and put together to lines, with a digest the ledger can repeat."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add
from urllib.parse import unquote_to_bytes
from zlib import crc32

from ratelimits.engine.keys import ANONYMOUS, LONGEST_NAME, ledger_name
from ratelimits.models.ledger import Batch

CUM_MODULUS = 10**15
_LARGEST = 2**63 - 1

_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")
# Which counters a field adds to, by its kind and by what it counts.
_PLACES = {
    f"{kind}{count}".encode(): places
    for number, kind in enumerate("adrs")
    for count, places in (("1", (2 * number, 2 * number + 1)), ("n", (2 * number,)), ("u", (2 * number + 1,)))
}
#: A name that stands for usage without an account is none's own.
_UNNAMED = f"|{ANONYMOUS}|".encode()
#: Which parts of a field are numbers, and which are texts.
_NUMBERS, _TEXTS = (1, 2, 4, 5), (3, 6, 7)
#: What makes a text another one once it is decoded and escaped; the line feed stands between fields.
_ODD = bytes(range(32)).replace(b"\n", b"") + b"%\\"
#: Digits that a counter of 64 bits has at most.
_DIGITS = 19
_ZEROS = b"\t0" * 6
_LINE = b"%b" + b"\t%d" * 8
#: The texts of a batch's identity, and how long each may be.
_LONGEST = {b"#i": 64, b"#r": 128, b"#x": 128, b"#f": 100}


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
    return escaped(ledger_name(unquote_to_bytes(raw).decode(errors="replace"))).encode()


def _columns(names: list[bytes]) -> list[list[bytes]]:
    """The nine parts of fields "kind|bin|period|meter|rule|version|account|key|count", each as a column.

    A batch is taken apart at once, since a step in Python for each part of each field is what a drain would wait for.
    """
    text, breaks = b"|\n|".join(names), len(names) - 1
    parts = text.split(b"|")
    # A break is a tenth part, so where all breaks stand in their places every field has nine.
    if (
        len(parts) != 10 * breaks + 9
        or parts[9::10].count(b"\n") != breaks
        or text.count(b"\n") != breaks
        or b"#" in text
    ):
        bad = next(name for name in names if name.count(b"|") != 8 or b"\n" in name or b"#" in name)
        raise Unreadable(f"a field is not kind|bin|period|meter|rule|version|account|key|count: {bad[:200]!r}")
    columns = [parts[place::10] for place in range(9)]
    for place in _NUMBERS:
        for number in set(columns[place]):
            if _NUMBER.fullmatch(number) is None:
                raise Unreadable(f"a field has {number[:40]!r} where a number belongs")
    if not (
        text.isascii()
        and len(text.translate(None, _ODD)) == len(text)
        and max(map(len, names)) <= LONGEST_NAME
        and _UNNAMED not in text
    ):
        for place in _TEXTS:
            texts = {raw: _text(raw) for raw in set(columns[place])}
            columns[place] = [texts[raw] for raw in columns[place]]
    return columns


def _lines(counters: dict[bytes, bytes]) -> tuple[list[bytes], int]:
    """The canonical lines of a batch's counters, sorted, and the sum of all that they count."""
    if not counters:
        return [], 0
    kinds, bins, periods, meters, rules, versions, accounts, keys, counted = _columns(list(counters))
    if not all(map(bytes.isdigit, counters.values())) or max(map(len, counters.values())) > _DIGITS:
        name, value = next(item for item in counters.items() if not item[1].isdigit() or len(item[1]) > _DIGITS)
        raise Unreadable(f"the field {name[:200]!r} holds {value[:40]!r}, no whole number of 64 bits")
    counts = list(map(int, counters.values()))
    if max(counts) > _LARGEST:
        raise Unreadable("a counter is larger than 64 bits hold")
    signs = list(map(add, kinds, counted))
    if unknown := set(signs) - _PLACES.keys():
        raise Unreadable(f"a field of an unknown kind: {sorted(unknown)[0][:40]!r}")
    subjects = list(map(b"\t".join, zip(accounts, keys, meters, rules, versions, periods, bins, strict=True)))
    if set(signs) == {b"a1"} and len(set(subjects)) == len(subjects):
        # Most batches: nothing but requests of one unit.
        pairs = zip(subjects, counts, strict=True)
        return sorted([b"%b\t%d\t%d%b" % (subject, count, count, _ZEROS) for subject, count in pairs]), 2 * sum(counts)
    rows: dict[bytes, list[int]] = {}
    find = rows.get
    for subject, sign, count in zip(subjects, signs, counts, strict=True):
        # Two names can be one once they are decoded.
        row = find(subject)
        if row is None:
            row = rows[subject] = [0, 0, 0, 0, 0, 0, 0, 0]
        for place in _PLACES[sign]:
            row[place] += count
    if max(map(max, rows.values())) > _LARGEST:
        raise Unreadable("a counter is larger than 64 bits hold")
    return sorted([_LINE % (subject, *row) for subject, row in rows.items()]), sum(map(sum, rows.values()))


def _identity(fields: dict[bytes, bytes]) -> tuple[list[str], list[int]]:
    """Incarnation, run, sealed under which run, what it follows; number, sum before, sum, opened at, sealed at."""
    try:
        texts = [fields[name].decode() for name in _LONGEST]
        raw = [fields[name] for name in (b"#s", b"#p", b"#c", b"#o", b"#t")]
    except KeyError as error:
        raise Unreadable(f"the batch lacks its {error.args[0].decode()}") from error
    except ValueError as error:
        raise Unreadable(f"the batch's identity cannot be read: {error}") from error
    for text, longest in zip(texts, _LONGEST.values(), strict=True):
        if len(text) > longest or not text.isprintable():
            raise Unreadable(f"the batch's identity cannot be read: {text[:40]!r} is no name of a run or a batch")
    for number in raw:
        if _NUMBER.fullmatch(number) is None:
            raise Unreadable(f"the batch's identity cannot be read: {number[:40]!r} is no whole number")
    if texts[3] and not texts[3].rpartition(":")[2].isdecimal():
        raise Unreadable(f"the batch's identity cannot be read: it follows {texts[3][:40]!r}, no batch")
    return texts, list(map(int, raw))


def packet(shard: int, fields: Iterable[tuple[bytes, bytes]]) -> Packet:
    """The batch that these fields of its hash are; Unreadable if they are not all of one, with sums that hold."""
    counters = dict(fields)
    about = {name: counters.pop(name) for name in [name for name in counters if name[:1] == b"#"]}
    (incarnation, run, sealed_run, follows), (seq, before, cum, opened_at, sealed_at) = _identity(about)
    lines, total = _lines(counters)
    if (before + total) % CUM_MODULUS != cum:
        raise Unreadable(f"the running sum was {before}, the counters add {total}, but it became {cum}")
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
