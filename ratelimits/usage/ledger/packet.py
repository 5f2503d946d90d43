"""Reading a sealed batch from Redis: check its fields, combine its counters into lines, and calculate its digest.

A canonical line is the text of a line in the digest: the values of the line, separated by tabs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add
from urllib.parse import unquote_to_bytes
from zlib import crc32

from ratelimits.engine.keys import ANONYMOUS, LONGEST_NAME, ledger_name
from ratelimits.salts import new_salt
from ratelimits.usage.models.ledger import Batch

#: Running sums start again at 0 when they reach this number.
CUM_MODULUS = 10**15
#: Maximum of a 64-bit counter.
_MAX_COUNT = 2**63 - 1

#: A whole number of at most 18 digits, without zeros before it.
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")
#: The name of a field starts with the kind of requests (a: admitted, d: denied, r: refunded, s: refused in shadow mode)
#: and ends with what the field counts (1: requests of one unit each, n: requests, u: units). A line has two counters
#: for each kind: its requests, then its units. By the start and the end of a field's name, such as "a1", this dict has
#: the indexes of the counters to which the field adds.
_COUNTER_INDEXES = {
    f"{kind}{count}".encode(): indexes
    for index, kind in enumerate("adrs")
    for count, indexes in (("1", (2 * index, 2 * index + 1)), ("n", (2 * index,)), ("u", (2 * index + 1,)))
}
#: Reports and gaps use the name ANONYMOUS for usage without an account. If it stands in the name of a field, somebody
#: has given this name to an account, a key or a meter. Then `_text` replaces it.
_RESERVED = f"|{ANONYMOUS}|".encode()
#: The index of the bin in a canonical line.
_BIN = 5
#: The indexes of the columns of `_columns` that are numbers (bin, rule, version), and of those that are texts (meter,
#: account, key).
_NUMBERS, _TEXTS = (1, 3, 4), (2, 5, 6)
#: Characters that decoding or escaping changes. The line feed is left out: `_columns` adds line feeds, and refuses
#: names that contain one.
_SPECIAL = bytes(range(32)).replace(b"\n", b"") + b"%\\"
#: Maximum number of digits of a 64-bit counter.
_MAX_DIGITS = 19
#: A canonical line: the subject, and the eight counters of a line.
_LINE = b"%b" + b"\t%d" * 8
#: The last six counters of a line, if the line has only admitted requests. The first two counters count these requests.
_ZEROS = b"\t0" * 6
#: The fields for `incarnation`, `run`, `sealed_run` and `follows` of a `Packet`, with their maximum lengths.
_MAX_LENGTHS = {b"#i": 64, b"#r": 128, b"#x": 128, b"#f": 100}


class Unreadable(ValueError):
    """Raised if a batch does not have the form that sealing writes; the message says why."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A complete and checked sealed batch. Moments are in µs since 1970 UTC."""

    shard: int
    #: The name of the series of batch numbers to which `seq` belongs. A new run begins a new series.
    incarnation: str
    #: The number of the batch in its incarnation.
    seq: int
    #: The running sum of all counters before this batch.
    previous_cum: int
    #: The running sum of all counters after this batch.
    cum: int
    #: The running sum of the requests alone before this batch.
    previous_requests: int
    opened_at: int
    sealed_at: int
    #: The run (the time from a start of the server until its restart) in which the batch was opened.
    run: str
    #: The run in which the batch was sealed.
    sealed_run: str
    #: The last batch of the previous incarnation, as "incarnation:seq"; "" if no batch came before.
    follows: str
    #: The canonical lines, sorted.
    lines: tuple[bytes, ...]
    #: A random text with which the digest begins. It is another one each time that the batch is read.
    salt: str
    #: The digest of the batch's salt, header and lines, in hexadecimal.
    content: str


def escaped(text: str) -> str:
    """Return a text escaped for a canonical line (and for PostgreSQL's COPY format)."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def unescaped(text: str) -> str:
    """Return the text from which `escaped` made this text."""
    if "\\" not in text:
        return text
    return re.sub(r"\\(.)", lambda match: {"t": "\t", "n": "\n", "r": "\r"}.get(match[1], match[1]), text)


def canonical(values: Sequence[str | int]) -> bytes:
    """Return the canonical line of these values: the values in their order, escaped, with tabs between them."""
    return "\t".join([escaped(value) if isinstance(value, str) else str(value) for value in values]).encode()


def checksum(line: bytes) -> int:
    """Return the CRC-32 of a canonical line."""
    return crc32(line)


def content_digester(header: Sequence[str | int]) -> hashlib._Hash:
    """Return a SHA-256 object with a batch's header. For each line, the caller adds a line feed and the line."""
    return hashlib.sha256(canonical(header))


def content_digest(header: Sequence[str | int], lines: Sequence[bytes]) -> str:
    """Return the SHA-256 of a batch's header and its canonical lines, in hexadecimal."""
    digest = content_digester(header)
    digest.update(b"\n".join([b"", *lines]))
    return digest.hexdigest()


def header_of(batch: Packet | Batch) -> tuple[str | int, ...]:
    """Return the values of a batch that are in its digest before the lines."""
    return (
        "ratelimits batch 4",
        batch.salt,
        batch.shard,
        batch.incarnation,
        batch.seq,
        batch.previous_cum,
        batch.cum,
        batch.previous_requests,
        batch.opened_at,
        batch.sealed_at,
        batch.run,
        batch.sealed_run,
        batch.follows,
    )


def newest_bin(packet: Packet) -> int:
    """Return the start of the latest bin with usage (s since 1970 UTC); 0 if the batch has no lines."""
    return max((int(line.split(b"\t", _BIN + 1)[_BIN]) for line in packet.lines), default=0)


def chained(previous: str, content: str) -> str:
    """Return the digest that follows `previous` in a shard's chain, if the next batch has the digest `content`."""
    return hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()


def _text(raw: bytes) -> bytes:
    """Return a percent-encoded name from Redis as the ledger stores it, escaped for a canonical line."""
    return escaped(ledger_name(unquote_to_bytes(raw).decode(errors="replace"))).encode()


def _columns(names: list[bytes]) -> list[list[bytes]]:
    """Split the names of fields, "kind|bin|meter|rule|version|account|key|count", into eight columns.

    Raise Unreadable if a name has another form. All names are split in one step, since a Python loop over the parts of
    each name would make the drain slow.
    """
    text, line_feeds = b"|\n|".join(names), len(names) - 1
    parts = text.split(b"|")
    # If every ninth part is a line feed, every name has eight parts.
    if (
        len(parts) != 9 * line_feeds + 8
        or parts[8::9].count(b"\n") != line_feeds
        or text.count(b"\n") != line_feeds
        or b"#" in text
    ):
        invalid = next(name for name in names if name.count(b"|") != 7 or b"\n" in name or b"#" in name)
        raise Unreadable(f"the name of a field is not kind|bin|meter|rule|version|account|key|count: {invalid[:200]!r}")
    columns = [parts[index::9] for index in range(8)]
    for index in _NUMBERS:
        for number in set(columns[index]):
            if _NUMBER.fullmatch(number) is None:
                raise Unreadable(f"the name of a field has {number[:40]!r} instead of a number")
    # Names that decoding and escaping do not change are the usual case. They stay as they are.
    if not (
        text.isascii()
        and len(text.translate(None, _SPECIAL)) == len(text)
        and max(map(len, names)) <= LONGEST_NAME
        and _RESERVED not in text
    ):
        for index in _TEXTS:
            texts = {raw: _text(raw) for raw in set(columns[index])}
            columns[index] = [texts[raw] for raw in columns[index]]
    return columns


def _lines(counters: dict[bytes, bytes]) -> tuple[list[bytes], int]:
    """Return the sorted canonical lines of a batch's counters, and the sum of all requests and units in them."""
    if not counters:
        return [], 0
    kinds, bins, meters, rules, versions, accounts, keys, count_kinds = _columns(list(counters))
    if not all(map(bytes.isdigit, counters.values())) or max(map(len, counters.values())) > _MAX_DIGITS:
        name, value = next(
            (name, value) for name, value in counters.items() if not value.isdigit() or len(value) > _MAX_DIGITS
        )
        raise Unreadable(f"the field {name[:200]!r} has the value {value[:40]!r}, which is not a 64-bit whole number")
    counts = list(map(int, counters.values()))
    if max(counts) > _MAX_COUNT:
        raise Unreadable("a counter is too large for 64 bits")
    starts_and_ends = list(map(add, kinds, count_kinds))
    if unknown := set(starts_and_ends) - _COUNTER_INDEXES.keys():
        raise Unreadable(f"a field has an unknown kind: {sorted(unknown)[0][:40]!r}")
    subjects = list(map(b"\t".join, zip(accounts, keys, meters, rules, versions, bins, strict=True)))
    if set(starts_and_ends) == {b"a1"} and len(set(subjects)) == len(subjects):
        # Most batches contain only admitted requests of one unit each. So each count is a number of requests and also
        # a number of units. Both are added to the running sum.
        pairs = zip(subjects, counts, strict=True)
        return sorted([b"%b\t%d\t%d%b" % (subject, count, count, _ZEROS) for subject, count in pairs]), 2 * sum(counts)
    rows: dict[bytes, list[int]] = {}
    find = rows.get
    for subject, start_and_end, count in zip(subjects, starts_and_ends, counts, strict=True):
        # Several fields can have one subject. Two different names can also give the same subject after decoding.
        row = find(subject)
        if row is None:
            row = rows[subject] = [0, 0, 0, 0, 0, 0, 0, 0]
        for index in _COUNTER_INDEXES[start_and_end]:
            row[index] += count
    if max(map(max, rows.values())) > _MAX_COUNT:
        raise Unreadable("a counter is too large for 64 bits")
    return sorted([_LINE % (subject, *row) for subject, row in rows.items()]), sum(map(sum, rows.values()))


def _identity(fields: dict[bytes, bytes]) -> tuple[list[str], list[int]]:
    """Return the texts and the numbers of a batch's identity. Raise Unreadable if one of them is missing or invalid.

    The texts are `incarnation`, `run`, `sealed_run` and `follows` of a `Packet`. The numbers are its `seq`,
    `previous_cum`, `cum`, `previous_requests`, `opened_at` and `sealed_at`.
    """
    try:
        texts = [fields[name].decode() for name in _MAX_LENGTHS]
        # The fields for `seq`, `previous_cum`, `cum`, `previous_requests`, `opened_at` and `sealed_at`.
        raw = [fields[name] for name in (b"#s", b"#p", b"#c", b"#q", b"#o", b"#t")]
    except KeyError as error:
        raise Unreadable(f"the batch has no field {error.args[0].decode()}") from error
    except ValueError as error:
        raise Unreadable(f"the batch's identity cannot be read: {error}") from error
    for text, longest in zip(texts, _MAX_LENGTHS.values(), strict=True):
        if len(text) > longest or not text.isprintable():
            raise Unreadable(f"the batch's identity cannot be read: {text[:40]!r} is not the name of a run or a batch")
    for number in raw:
        if _NUMBER.fullmatch(number) is None:
            raise Unreadable(f"the batch's identity cannot be read: {number[:40]!r} is not a whole number")
    follows = texts[-1]
    if follows and not follows.rpartition(":")[2].isdecimal():
        raise Unreadable(f"the batch's identity cannot be read: it follows {follows[:40]!r}, which is not a batch")
    return texts, list(map(int, raw))


def packet(shard: int, fields: Iterable[tuple[bytes, bytes]]) -> Packet:
    """Return the `Packet` for the fields of a sealed batch's hash.

    Raise Unreadable if a field is missing or invalid, or if the running sum does not match the counters.
    """
    counters = dict(fields)
    identity = {name: counters.pop(name) for name in [name for name in counters if name[:1] == b"#"]}
    texts, (seq, previous_cum, cum, previous_requests, opened_at, sealed_at) = _identity(identity)
    incarnation, run, sealed_run, follows = texts
    lines, total = _lines(counters)
    if (previous_cum + total) % CUM_MODULUS != cum:
        raise Unreadable(f"the running sum was {previous_cum}, the counters add {total}, but the sum became {cum}")
    without_digest = Packet(
        shard,
        incarnation,
        seq,
        previous_cum,
        cum,
        previous_requests,
        opened_at,
        sealed_at,
        run,
        sealed_run,
        follows,
        tuple(lines),
        salt=new_salt(),
        content="",
    )
    return replace(without_digest, content=content_digest(header_of(without_digest), lines))


def values(line: bytes) -> list[str]:
    """Return the values of a canonical line as texts. Databases also accept numbers that are written as texts."""
    parts = line.decode().split("\t")
    if b"\\" in line:
        parts[:3] = map(unescaped, parts[:3])  # account, key and meter: the only texts of `SUBJECT`
    return parts
