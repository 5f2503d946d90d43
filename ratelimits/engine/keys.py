"""The names of all Redis keys.

All keys of a shard have the same hash tag, `rl:<schema>:<namespace>:{07}:…`. So the limits, the version and the usage
of one account are in one slot of a cluster, and one script call reaches them all. No secret and no text of unbounded
length becomes part of a key: an API key appears as its id, a long name as its digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote
from zlib import crc32

SCHEMA = 1
BIN_SECONDS = 900
#: Maximum bytes of a text that becomes part of a key as it is.
LONGEST = 96
#: Maximum characters of the name of an account, a key or a meter in usage: the length of the ledger's columns.
LONGEST_NAME = 255
#: The name of usage without an account in reports. No account can have this name.
ANONYMOUS = "~anonymous"
#: Names that need no quoting.
_PLAIN = re.compile(rf"(?!{ANONYMOUS}\Z)[A-Za-z0-9:@._~-]{{0,{LONGEST_NAME}}}")
#: Characters that not every database can store: NUL, and halves of surrogate pairs.
_UNKEPT = re.compile("[\0\ud800-\udfff]")
LONGEST_NAMESPACE = 40
_NAMESPACE = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAMESPACE}}}")


def shard_of(owner: str, shards: int) -> int:
    """Return the shard of an account, or of a key without one: crc32 modulo the number of shards."""
    return crc32(owner.encode()) % shards


def name_id(name: str) -> int:
    """Return the 32-bit number for a rule's name in a state: its crc32."""
    return crc32(name.encode())


def bounded(text: str) -> str:
    """Return a text as part of a Redis key: itself, or its kind and digest if it has more than LONGEST bytes."""
    # A character takes four bytes at most.
    if 4 * len(text) <= LONGEST or len(text.encode()) <= LONGEST:
        return text
    return _digest(text)


def _digest(text: str) -> str:
    """Return a text's kind (the part before a colon) and its digest."""
    kind, colon, _rest = text[:16].partition(":")
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{kind}:~{digest}" if colon else f"~{digest}"


def ledger_name(text: str) -> str:
    """Return the name of an account, a key or a meter in Redis, the ledger and the reports.

    It is the text itself; or its kind and digest if it has more than LONGEST_NAME characters or is ANONYMOUS.
    Characters that not every database can store are replaced by U+FFFD. The ledger name of a ledger name is itself.
    """
    if len(text) <= LONGEST_NAME and text.isascii() and "\0" not in text and text != ANONYMOUS:
        return text
    kept = _UNKEPT.sub("\ufffd", text)
    return _digest(kept) if len(kept) > LONGEST_NAME or kept == ANONYMOUS else kept


def quoted(text: str) -> str:
    """Return the ledger name of a text, quoted for the name of a usage field, where '|' and '#' have a meaning."""
    return text if _PLAIN.fullmatch(text) else _quote(text)


@lru_cache(maxsize=8192)
def _quote(text: str) -> str:
    return quote(ledger_name(text), safe=":@.-_~")


def own_name(letter: str, name: str) -> str:
    """Return the name of the own state of the limit `name`. `letter` is its algorithm's: their states differ."""
    return f"{letter}:{name_id(name):x}"


#: The names, after a shard's prefix, of the keys that Lua makes too. engine/scripts.py puts them into the scripts.
SHARD_KEYS = {"head": "head", "open": "open", "meta": "meta", "sealed": "sealed", "batch": "b:"}


@lru_cache(maxsize=16384)
def _prefix(namespace: str, shard: int) -> str:
    return f"rl:{SCHEMA}:{namespace}:{{{shard:02d}}}:"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The keys of one namespace, spread over `shards` slots."""

    namespace: str
    shards: int

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(
                f"namespace {self.namespace!r} must be 1 to {LONGEST_NAMESPACE} letters, digits, '_', '.' or '-'"
            )
        if not 1 <= self.shards <= 16384:
            raise ValueError(f"shards must be from 1 to 16384, not {self.shards}")

    def prefix(self, shard: int) -> str:
        """Return the prefix of all keys of a shard."""
        return _prefix(self.namespace, shard)

    def head(self, shard: int) -> str:
        """Return the key of a string, "<configuration version> <run>", with which every decision is compared."""
        return self.prefix(shard) + SHARD_KEYS["head"]

    def open(self, shard: int) -> str:
        """Return the key of a hash: the open batch of usage (see lua/batch.lua for its fields)."""
        return self.prefix(shard) + SHARD_KEYS["open"]

    def meta(self, shard: int) -> str:
        """Return the key of a hash: incarnation, seq, cum and run of the shard's batches."""
        return self.prefix(shard) + SHARD_KEYS["meta"]

    def sealed(self, shard: int) -> str:
        """Return the key of a list: the "<incarnation>:<seq>" of sealed batches, oldest first."""
        return self.prefix(shard) + SHARD_KEYS["sealed"]

    def batch(self, shard: int, identity: str) -> str:
        """Return the key of a hash: the sealed batch with this "<incarnation>:<seq>"."""
        return self.prefix(shard) + SHARD_KEYS["batch"] + identity

    def state(self, shard: int, key: str) -> str:
        """Return the key of a string: the packed states of all limits of a key."""
        return f"{self.prefix(shard)}s:{bounded(key)}"

    def own(self, shard: int, own_name: str, key: str) -> str:
        """Return the own key of the limit with this `own_name`, whose state has no fixed size.

        Further keys of the limit have an ending more, which its algorithm names. No own key has such an ending.
        """
        return f"{self.prefix(shard)}{own_name}:{bounded(key)}:"

    def receipt(self, shard: int, nonce: str) -> str:
        """Return the key of a string that exists once the receipt was refunded or settled."""
        return f"{self.prefix(shard)}r:{nonce}"

    @property
    def layout(self) -> str:
        """Return the key of a string: the number of shards with which the namespace was first used."""
        return f"rl:{SCHEMA}:{self.namespace}:shards"

    def fence(self, shard: int) -> str:
        """Return the key of a string that each drain writes, so that an fsync follows everything that it has read."""
        return self.prefix(shard) + "fence"
