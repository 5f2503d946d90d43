"""The texts of view keys, such as "header:X-Tenant=acme", and the names under which such keys are counted.

A text has a source and a value. The source says where a view finds the value: "header:X-Tenant", "query:team",
"field:email", "arg:pk", or "call:" and the path of a function. Different texts can mean the same value, such as "01"
and "1". So a value has one normal form, and all texts with this form have one name. The name contains only digests,
because the value can be secret and of any length.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ratelimits.naming import respelled

#: The words before the colon of a source. The source "call" is a function of the project.
SOURCES = ("header", "query", "field", "arg", "call")
#: Changes of a value that a source can name after a vertical bar, as in "field:email|lower".
TRANSFORMS: dict[str, Callable[[str], str]] = {"lower": str.lower}
#: Maximum number of characters of a source in a rule.
LONGEST_SOURCE = 150
#: Maximum number of characters that are changed to the form NFKC. A longer text is left as it is: the change can take
#: long, and no column of a database has such a text as a name. (ASCII texts of any length have this form already.)
MAX_NORMALISED = 1_024
#: Maximum number of characters that are read as a number. By default, Python reads 4,300 digits, with or without
#: underscores between them.
_MAX_NUMBER = 9_000
#: Names that a source can have. They contain no control characters, and no "=" or "|", which end the name.
_NAME = re.compile(r"[^\s\x00-\x1f\x7f=|](?:[^\x00-\x1f\x7f=|]*[^\s\x00-\x1f\x7f=|])?")
_KIND = "view_key:"


class KeySource(NamedTuple):
    """Where a view finds the value of a key.

    text       the text of the source, such as "field:email|lower"
    kind       one of SOURCES
    name       the name of the header, the parameter, the field or the argument, or the path of the function
    transform  one of TRANSFORMS, or ""
    digest     a digest of the text, with 8 characters. All names of the source's values begin with it
    """

    text: str
    kind: str
    name: str
    transform: str
    digest: str


@lru_cache(maxsize=1024)
def source_of(text: str) -> KeySource:
    """Return the source that a text means. Raise ValueError if the text is not a source."""
    kind, _colon, rest = text.strip().partition(":")
    name, bar, transform = rest.partition("|")
    if kind not in SOURCES or not _NAME.fullmatch(name):
        raise ValueError(f"{text!r} is not the key of a view")
    if bar and (kind == "call" or transform not in TRANSFORMS):
        raise ValueError(f"{text!r} does not end with one of these: |{', |'.join(TRANSFORMS)}")
    if kind == "header":
        # Upper and lower case mean the same header, and servers write "_" for "-".
        name = "-".join(part.capitalize() for part in name.replace("_", "-").split("-"))
    text = f"{kind}:{name}|{transform}" if transform else f"{kind}:{name}"
    return KeySource(text, kind, name, transform, _digest(text, 4))


def normal_value(source: KeySource, text: str) -> str:
    """Return the normal form of a value. If this function is called with its own result, it returns the same form.

    White space at the start and the end is removed, the characters have the form NFKC, and a text that Django's
    `IntegerField` reads as a whole number is this number. The result of a function is not changed.
    """
    if source.kind == "call":
        return text
    normal = _normal(text)
    return _normal(TRANSFORMS[source.transform](normal)) if source.transform else normal


def _normal(text: str) -> str:
    text = text.strip()
    if not text.isascii() and len(text) <= MAX_NORMALISED:
        text = unicodedata.normalize("NFKC", text).strip()
    if text and (text[0].isdecimal() or text[0] in "+-"):
        # `IntegerField` reads "1." and "1.0" as 1.
        whole, point, zeros = text.rpartition(".")
        digits = whole if point and not zeros.strip("0") else text
        if len(digits) <= _MAX_NUMBER:
            try:
                return str(int(digits))
            except ValueError:
                return text
    return text


def name_of(source: KeySource, value: str) -> str:
    """Return the name under which a value is counted: "view_key:", the digest of the source, and a digest of both.

    `value` is the normal form of the value; "" stands for requests without the value.
    """
    return f"{_KIND}{source.digest}.{_digest(f'{source.text}={value}', 12)}"


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


def source_digest(name: str) -> str:
    """Return the digest of the source in a name (see `name_of`)."""
    return name[len(_KIND) : len(_KIND) + 8]


def shared_name(name: str) -> str:
    """Return the name under which all new values of a source are counted while memory is full (quota/shortage)."""
    return f"{name[: len(_KIND) + 8]}.shared"


def is_text(text: str) -> bool:
    """Return whether a text begins like a view key, such as "header:…"."""
    return text.partition(":")[0] in SOURCES


def read(text: str) -> tuple[KeySource, str]:
    """Return the source and the value of a text such as "header:X-Tenant=acme". The value has its normal form.

    For a function, this is the name of its result (see `naming`). Raise ValueError if the text is not a view key.
    """
    source_text, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} has no value")
    source = source_of(source_text)
    return source, respelled(value) if source.kind == "call" else normal_value(source, value)
