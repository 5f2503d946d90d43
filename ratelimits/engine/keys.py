"""Every Redis key, named once.

All keys of a shard carry its hash tag, `rl:<schema>:<namespace>:{07}:…`, so that the limits, the version and the usage
of one account share a slot of a cluster, and one script call serves them all. Nothing unbounded and nothing secret
becomes part of a key: an API key appears by its id, and a long name by its digest.
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
#: Longest text that becomes part of a key as it is.
LONGEST = 96
#: Longest name of an account, a key or a meter in usage, in characters: as long as the ledger's columns.
LONGEST_NAME = 255
#: How reports name usage without an account; no account has that name.
ANONYMOUS = "~anonymous"
#: What quoting leaves as it is.
_PLAIN = re.compile(rf"(?!{ANONYMOUS}\Z)[A-Za-z0-9:@._~-]{{0,{LONGEST_NAME}}}")
#: Characters that no database keeps: NUL, and halves of surrogate pairs.
_UNKEPT = re.compile("[\0\ud800-\udfff]")
LONGEST_NAMESPACE = 40
_NAMESPACE = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAMESPACE}}}")


def shard_of(owner: str, shards: int) -> int:
    """The shard of an account (else of a key): crc32 modulo the number of shards."""
    return crc32(owner.encode()) % shards


def name_id(name: str) -> int:
    """The 32-bit number that a rule's name has in a state: its crc32."""
    return crc32(name.encode())


def bounded(text: str) -> str:
    """Return the text itself, or its kind and digest if it has more than LONGEST bytes, as a part of a Redis key."""
    # A character takes four bytes at most.
    if 4 * len(text) <= LONGEST or len(text.encode()) <= LONGEST:
        return text
    return _digest(text)


def _digest(text: str) -> str:
    """Return a text's kind (what is before a colon) and its digest."""
    kind, colon, _rest = text[:16].partition(":")
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{kind}:~{digest}" if colon else f"~{digest}"


def ledger_name(text: str) -> str:
    """Return the one name that Redis, the ledger and the reports have for an account, a key or a meter.

    It is the text itself if that has at most LONGEST_NAME characters, else its kind and digest, as for an account that
    is called ANONYMOUS. Characters that no database keeps are replaced by U+FFFD. A ledger name's own is itself.
    """
    if len(text) <= LONGEST_NAME and text.isascii() and "\0" not in text and text != ANONYMOUS:
        return text
    kept = _UNKEPT.sub("\ufffd", text)
    return _digest(kept) if len(kept) > LONGEST_NAME or kept == ANONYMOUS else kept


def quoted(text: str) -> str:
    """Return the ledger name of a text as a part of a usage field's name, where '|' and '#' have a meaning."""
    return text if _PLAIN.fullmatch(text) else _quote(text)


@lru_cache(maxsize=8192)
def _quote(text: str) -> str:
    return quote(ledger_name(text), safe=":@.-_~")


def own_name(letter: str, name: str) -> str:
    """Return what the own state of the limit `name` is called: by its algorithm's letter too, since others' differ."""
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
        """What all keys of a shard start with."""
        return _prefix(self.namespace, shard)

    def head(self, shard: int) -> str:
        """String "<configuration version> <run>": what every decision is compared with."""
        return self.prefix(shard) + SHARD_KEYS["head"]

    def open(self, shard: int) -> str:
        """Hash: the open batch of usage (lua/batch.lua says what is in it)."""
        return self.prefix(shard) + SHARD_KEYS["open"]

    def meta(self, shard: int) -> str:
        """Hash: incarnation, seq, cum, run of the shard's batches."""
        return self.prefix(shard) + SHARD_KEYS["meta"]

    def sealed(self, shard: int) -> str:
        """List of "<incarnation>:<seq>", oldest first."""
        return self.prefix(shard) + SHARD_KEYS["sealed"]

    def batch(self, shard: int, identity: str) -> str:
        """Hash: a sealed batch, by its "<incarnation>:<seq>"."""
        return self.prefix(shard) + SHARD_KEYS["batch"] + identity

    def state(self, shard: int, key: str) -> str:
        """String: the packed fixed-size states of all limits of a key."""
        return f"{self.prefix(shard)}s:{bounded(key)}"

    def own(self, shard: int, own_name: str, key: str) -> str:
        """The key of a state that is not of fixed size, of the limit with that `own_name`.

        Keys that belong to it end with an ending more, which its algorithm names; no own key ends so.
        """
        return f"{self.prefix(shard)}{own_name}:{bounded(key)}:"

    def receipt(self, shard: int, nonce: str) -> str:
        """String: there once the receipt was refunded or settled."""
        return f"{self.prefix(shard)}r:{nonce}"

    @property
    def layout(self) -> str:
        """String: the number of shards that this namespace was first used with."""
        return f"rl:{SCHEMA}:{self.namespace}:shards"

    def fence(self, shard: int) -> str:
        """String: written by each drain, so that there is something to fsync behind all that it read."""
        return self.prefix(shard) + "fence"
