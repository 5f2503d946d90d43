"""Salts and pseudonyms: digests in which nobody can find a name by trying names, once the salt is deleted.

A digest of values, such as the digest of a batch, begins with a salt: a random text. Who knows all values but a name
could else compute the digest for each possible name, and find the right one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from functools import cache

#: Length of a salt in bytes. As a text, it has twice as many hexadecimal digits.
SALT_BYTES = 16
#: Keys begin with their kind, which says nothing about a person. (A rule can count a key of the kind "global".)
_KIND = re.compile(r"[a-z_]{1,15}:")


def new_salt() -> str:
    """Return 16 random bytes, in hexadecimal."""
    return secrets.token_hex(SALT_BYTES)


def pseudonym_of_key(key: str, salt: str) -> str:
    """Return the text that replaces a key: its kind and a digest, such as "user:~0f3a…". A key without a kind stays.

    The key of an account has the pseudonym of the account's text.
    """
    kind = _KIND.match(key)
    if kind is None:
        return key
    return kind[0] + pseudonym(key.removeprefix("account:"), salt)


def pseudonym(text: str, salt: str) -> str:
    """Return the text that replaces an account text: a digest, such as "~0f3a…". No request has such a name."""
    data = text.encode(errors="surrogatepass")
    return f"~{hashlib.blake2b(data, key=bytes.fromhex(salt), digest_size=16).hexdigest()}"


class Pseudonyms:
    """Makes the pseudonyms of a customer's names with one salt. The same name always has the same pseudonym."""

    def __init__(self, salt: str) -> None:
        self.account: Callable[[str], str] = cache(lambda text: pseudonym(text, salt))
        self.key: Callable[[str], str] = cache(lambda key: pseudonym_of_key(key, salt))
