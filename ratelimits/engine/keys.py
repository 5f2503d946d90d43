"""Make the names of all Redis keys.

A shard is a part of the accounts. The Redis keys of shard 7 begin with `rl:<schema>:<namespace>:{07}:`. The namespace
is a setting: projects that share a server have different namespaces. A cluster puts all Redis keys with the same text
in braces into one slot. So one script call reaches the limits, the version and the usage of an account. A Redis key
contains no secret and no text of unlimited length: instead of an API key it contains the id or a digest of the API key,
and instead of a long name it contains a digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote
from zlib import crc32

#: The version of the format in which data is stored in Redis.
SCHEMA = 1
#: Length of a bin of usage, in seconds.
BIN_SECONDS = 900
#: Maximum length of a text in a Redis key, in bytes. A longer text is replaced by its digest.
LONGEST = 96
#: Maximum number of characters in the name of an account, a key or a meter in the ledger. The ledger's columns have
#: this length.
LONGEST_NAME = 255
#: Maximum number of characters of a key such as "account:acme", in which the account's name follows its kind.
LONGEST_KEY = len("account:") + LONGEST_NAME
#: The name under which reports show usage without an account. No account can have this name.
ANONYMOUS = "~anonymous"
#: Names that `quoted` does not change.
_PLAIN = re.compile(rf"(?!{ANONYMOUS}\Z)[A-Za-z0-9:@._~-]{{0,{LONGEST_NAME}}}")
#: Characters that some databases cannot store: NUL, and halves of surrogate pairs.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
#: Maximum length of a namespace, in characters.
LONGEST_NAMESPACE = 40
_NAMESPACE = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAMESPACE}}}")


def shard_of(owner: str, shards: int) -> int:
    """Return the shard of an account, or of a key without an account: crc32 modulo the number of shards."""
    return crc32(owner.encode()) % shards


def account_shard(account: str, shards: int) -> int:
    """Return the shard of an account: of its limits and its usage.

    If the account is itself a key, such as "api_key:shop.device:3", this is the shard of that key. So the limits of
    the key and the usage of the account are in one shard.
    """
    return shard_of(account if account.startswith(("user:", "api_key:")) else f"account:{account}", shards)


def name_id(name: str) -> int:
    """Return the 32-bit number (crc32) that stands in Redis for a limit's name, which is the name of its rule."""
    return crc32(name.encode())


def bounded(text: str) -> str:
    """Return a text as it is written in a Redis key.

    A text with at most LONGEST bytes is not changed. For a longer text, return its kind (such as "user") and a digest.
    """
    # A character takes four bytes at most. So do not encode a text with few characters: it is short enough.
    if 4 * len(text) <= LONGEST or len(text.encode()) <= LONGEST:
        return text
    return _digest(text)


def _digest(text: str) -> str:
    """Return a text's kind and its digest. The kind is the part before a colon in the first 16 characters."""
    kind, colon, _rest = text[:16].partition(":")
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{kind}:~{digest}" if colon else f"~{digest}"


def ledger_name(text: str) -> str:
    """Return the name of an account, a key or a meter in Redis, the ledger and the reports.

    Usually this is the text itself. For a text that has more than LONGEST_NAME characters or a character that some
    databases cannot store, and for ANONYMOUS, return the kind and a digest. If this function is called with its own
    result, it returns the same name again. (So a text that looks like a digest must not come here from outside: see
    `naming`.)
    """
    if len(text) <= LONGEST_NAME and text != ANONYMOUS and (text.isascii() or not _UNSTORABLE.search(text)):
        return text if "\0" not in text else _digest(text)
    return _digest(text)


def quoted(text: str) -> str:
    """Return the ledger name of a text, with special characters quoted as in a URL.

    The result is a part of the name of a usage counter. In such a name '|' separates the parts, so a '|' in the text is
    quoted.
    """
    return text if _PLAIN.fullmatch(text) else _quote(text)


@lru_cache(maxsize=8192)
def _quote(text: str) -> str:
    return quote(ledger_name(text), safe=":@.-_~")


def own_name(letter: str, name: str) -> str:
    """Return the part of an own key that names the limit. (An own key is a Redis key that belongs to one limit alone.)

    This part begins with the letter of the limit's algorithm. So if a rule gets another algorithm, the script does not
    read the old state, which has another format.
    """
    return f"{letter}:{name_id(name):x}"


#: The parts of Redis keys after a shard's prefix, for those Redis keys whose names the Lua scripts make too.
#: engine/assemble/scripts.py inserts these parts into the scripts.
SHARD_KEYS = {"head": "head", "open": "open", "meta": "meta", "sealed": "sealed", "batch": "b:", "receipts": "receipts"}


@lru_cache(maxsize=16384)
def _prefix(namespace: str, shard: int) -> str:
    return f"rl:{SCHEMA}:{namespace}:{{{shard:02d}}}:"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The Redis keys of one namespace. They are divided into `shards` shards.

    slots_move  whether the server is a cluster, whose slots may move to other nodes
    """

    namespace: str
    shards: int
    slots_move: bool = False

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
        """Return the key of a string, "<version of the rules> <run of the server>".

        Every decision compares its own version and run with this string.
        """
        return self.prefix(shard) + SHARD_KEYS["head"]

    def open(self, shard: int) -> str:
        """Return the key of a hash: the open batch of usage (see lua/batch.lua for its fields)."""
        return self.prefix(shard) + SHARD_KEYS["open"]

    def meta(self, shard: int) -> str:
        """Return the key of a hash: the newest numbers and moments of the shard's batches (fields: lua/batch.lua)."""
        return self.prefix(shard) + SHARD_KEYS["meta"]

    def sealed(self, shard: int) -> str:
        """Return the key of a list: the ids "<incarnation>:<seq>" of the sealed batches, the oldest first.

        `seq` is the number of a batch in its incarnation.
        """
        return self.prefix(shard) + SHARD_KEYS["sealed"]

    def prefetched(self, shard: int) -> str:
        """Return the name of a hash with the prefetches that may have uncounted requests (see engine/counting.py)."""
        return self.prefix(shard) + "prefetched"

    def batch(self, shard: int, batch_id: str) -> str:
        """Return the key of a hash: the sealed batch with this id, "<incarnation>:<seq>"."""
        return self.prefix(shard) + SHARD_KEYS["batch"] + batch_id

    def state(self, shard: int, key: str) -> str:
        """Return the key of a string: the packed state, which has the states of several limits of the limited `key`."""
        return f"{self.prefix(shard)}s:{bounded(key)}"

    def own(self, shard: int, own_name: str, key: str) -> str:
        """Return the own key of a limit: a Redis key that belongs to this limit alone.

        If the limit has further own keys, their names are this name with a suffix. The algorithm defines the suffixes.
        """
        return f"{self.prefix(shard)}{own_name}:{bounded(key)}:"

    def receipts(self, shard: int) -> str:
        """Return the key of a sorted set: the nonces of receipts that were refunded or settled (see lua/decide.lua)."""
        return self.prefix(shard) + SHARD_KEYS["receipts"]

    def fence(self, shard: int) -> str:
        """Return the key of a string that a drain writes to fence the batches (usage/ledger/fence.py).

        Because of this write the server fsyncs again. This fsync also saves everything that was written before.
        """
        return self.prefix(shard) + "fence"
