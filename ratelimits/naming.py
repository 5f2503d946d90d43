"""Turn any value into a name: the text that stands for a user, an API key or an account in limits and in the ledger.

Two values that are not the same never get one name. A name of a row contains its model. People type names as they see
them, so a text has a spelling that everybody can type: see `spelled`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from urllib.parse import quote, unquote_to_bytes
from uuid import UUID

from django.db.models import Model
from django.utils.functional import LazyObject, empty

#: Characters that nobody can type or see: control characters, white space except the simple space, the characters that
#: Unicode calls "default ignorable", and halves of surrogate pairs. The list is fixed: if it came from Python's version
#: of Unicode, a new version of Python would change names.
_HIDDEN = (
    "\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f"
    "\u205f-\u206f\u2800\u3000\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_HIDDEN_PATTERN = re.compile(f"[{_HIDDEN}]")
_KIND = "(?:api_key|user|account|ip|global):"
#: The place of another key in one text: after a comma, a semicolon, a slash, a vertical bar or white space. The key
#: must begin with a kind and a colon.
NEXT_KEY = re.compile(rf"(?<=[\s,;|/])(?={_KIND})")
#: Several whole numbers, as people write the ids of several users.
NUMBERS = re.compile(r"(?=\d+[ ,;])[\d ,;]*\d")
#: The characters of a text that its spelling replaces by "%XX": the hidden ones, a space that a form or a page would
#: remove, and whatever looks like the end of a key before another key.
_UNTYPABLE = rf"[{_HIDDEN}]|\A | \Z|(?<= ) |[ ,;|/](?=\s*{_KIND})"
_UNTYPABLE_PATTERN = re.compile(_UNTYPABLE)
_ESCAPED = re.compile(f"%|{_UNTYPABLE}")
#: Texts that are spelled as they are: the usual case.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
_LABEL = r"[^\W\d]\w*\.\w+:"
#: The beginning of a text that could be taken for a name of another kind: of a row, a user or an API key, or a digest.
#: A hyphen alone stands for "no account".
_LOOKS_LIKE_ANOTHER = re.compile(rf"[~=]|-\Z|user:|api_key:|{_LABEL}|[^:]{{0,15}}:~|{NUMBERS.pattern}\Z")
#: The same for the primary key of a row, which follows the label of its model.
_PK_LOOKS_LIKE_ANOTHER = re.compile("[~=]")
#: Names that are digests (see `ledger_name` in engine/keys.py).
_DIGEST = re.compile(r"(?:[^:]{0,15}:)?~[0-9a-f]{32}")
#: Names of API keys that requests have: the numbers, UUIDs and digests that `name_of` makes if texts are secrets.
_UUID = "-".join(f"[0-9a-f]{{{length}}}" for length in (8, 4, 4, 4, 12))
_SECRET = re.compile(rf"(?:{_LABEL})?(?:-?[0-9]+|[0-9a-f]{{24}}|{_UUID})")
_ROW = re.compile(f"=*{_LABEL}")
_LABEL_PATTERN = re.compile(f"(?:{_LABEL})?")
_ACCOUNT_PATTERN = re.compile(f"(?:user:|api_key:)?(?:{_LABEL})?")


class NotAName(TypeError):
    """Raised for a value that is no name. The message says what the value is, without the value itself."""


def name_of(value: Any, own: type[Model] | None = None, *, secret: bool = False) -> str | None:
    """Return the name of a value; None for None and for an empty text, which name nobody.

    A row of a model is named by its primary key, with the label of its model in front ("shop.device:3"). Rows of the
    model `own` have no label. A whole number, a text and a UUID are names themselves, in their spelling. If `secret` is
    true, texts are secrets: their names are digests. Raise NotAName for any other value, such as True, a dict or a
    coroutine.
    """
    value = unwrapped(value)
    if isinstance(value, Model):
        if value.pk is None:
            raise NotAName(f"a {value._meta.label} that is not saved")
        if own is not None and isinstance(value, own):
            # A row of a child of the model can have a primary key of its own.
            return spelled(_plain(getattr(value, own._meta.pk.attname), secret))
        meta = value._meta.concrete_model._meta  # type: ignore[union-attr]
        return f"{meta.label_lower}:{_spelled(_plain(value.pk, secret), _PK_LOOKS_LIKE_ANOTHER)}"
    return None if value is None or value in ("", b"") else spelled(_plain(value, secret))


def spelled(text: str) -> str:
    """Return a text as names spell it. No other text has this spelling.

    Usually this is the text itself. A text that looks like another kind of name, or that people cannot type, begins
    with "=". Then "%" and each character that cannot be typed are written as in a URL: "=a%0Ab" has a line feed.
    """
    return text if _PLAIN.fullmatch(text) else _spelled(text, _LOOKS_LIKE_ANOTHER)


def _spelled(text: str, looks_like_another: re.Pattern[str]) -> str:
    if not looks_like_another.match(text) and not _UNTYPABLE_PATTERN.search(text):
        return text
    return "=" + _ESCAPED.sub(lambda found: quote(found[0].encode(errors="surrogatepass"), safe=""), text)


def unlike_a_row(text: str) -> str:
    """Return a text that is no name of a row: with "=" in front if it looks like one."""
    return f"={text}" if _ROW.match(text) else text


def text_of(spelling: str) -> str:
    """Return the text that a spelling stands for."""
    if not spelling.startswith("="):
        return spelling
    try:
        return unquote_to_bytes(spelling[1:].encode(errors="surrogatepass")).decode(errors="surrogatepass")
    except UnicodeDecodeError:  # no text has this spelling
        return spelling


def respelled(name: str, *, of_account: bool = False) -> str:
    """Return the name that requests have instead of a typed name: usually the same, or else its text as it is spelled.

    The typed name can begin with the label of a model; that of an account also with "user:" or "api_key:".
    """
    if _DIGEST.fullmatch(name):
        return name
    start = (_ACCOUNT_PATTERN if of_account else _LABEL_PATTERN).match(name)
    prefix = start[0] if start else ""
    text = name[len(prefix) :]
    another = _PK_LOOKS_LIKE_ANOTHER if "." in prefix else _LOOKS_LIKE_ANOTHER
    return name if _spelled(text_of(text), another) == text else prefix + _spelled(text, another)


def without_secret(name: str) -> str:
    """Return the name that requests have instead of a typed name of an API key: with its digest instead of its text."""
    if _SECRET.fullmatch(name) or _DIGEST.fullmatch(name):
        return name
    start = _LABEL_PATTERN.match(name)
    label = start[0] if start else ""
    return label + digest(text_of(name[len(label) :]))


def is_shown(text: str) -> bool:
    """Return whether people can type and see each character of a text."""
    return not _HIDDEN_PATTERN.search(text)


def unwrapped(value: Any) -> Any:
    """Return the object in a lazy object. Load it if needed, which can make a query."""
    if isinstance(value, LazyObject):
        if value.__dict__["_wrapped"] is empty:
            value._setup()
        return value.__dict__["_wrapped"]
    return value


def _plain(value: Any, secret: bool) -> str:
    """Return a whole number, a UUID or a text as a text. Raise NotAName for other values."""
    if isinstance(value, (int, UUID)) and not isinstance(value, bool):
        try:
            return str(value if isinstance(value, UUID) else int(value))
        except ValueError as error:  # Python converts no number with so many digits
            raise NotAName("a number with thousands of digits") from error
    if isinstance(value, (str, bytes)):
        if secret:
            return digest(value)
        try:
            # A subclass can have another text, as members of an enum have.
            return str.__str__(value) if isinstance(value, str) else value.decode()
        except UnicodeDecodeError as error:
            raise NotAName("bytes that are not UTF-8") from error
    raise NotAName(f"a value of the type {type(value).__qualname__}")


def digest(secret: str | bytes) -> str:
    """Return a digest of a text, from which nobody can find the text."""
    data = secret.encode(errors="surrogatepass") if isinstance(secret, str) else secret
    return hashlib.blake2b(data, digest_size=12).hexdigest()
