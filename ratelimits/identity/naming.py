"""Turn any value into a name: the text that stands for a user, an API key or an account in limits and in the ledger.

Two values that are not the same never get one name. A name of a row contains its model. A text that looks like another
kind of name (of a row, of a user, of an API key, or a digest) is written with "=" in front of it.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from uuid import UUID

from django.db.models import Model
from django.utils.functional import LazyObject, empty

#: The beginning of a text that could be taken for a name of another kind.
_LOOKS_LIKE_ANOTHER = re.compile(r"[~=]|user:|api_key:|[^\W\d]\w*\.\w+:|[^:]{0,15}:~")


class NotAName(TypeError):
    """Raised for a value that is no name. The message says what the value is, without the value itself."""


def name_of(value: Any, own: type[Model] | None = None, *, secret: bool = False) -> str | None:
    """Return the name of a value; None for None and for an empty text, which name nobody.

    A row of a model is named by its primary key, with the label of its model in front ("shop.device:3"). Rows of the
    model `own` have no label. A whole number, a text and a UUID are names themselves. If `secret` is true, texts are
    secrets: their names are digests. Raise NotAName for any other value, such as True, a dict or a coroutine.
    """
    value = unwrapped(value)
    if isinstance(value, Model):
        if value.pk is None:
            raise NotAName(f"a {value._meta.label} that is not saved")
        if own is not None and isinstance(value, own):
            # A row of a child of the model can have a primary key of its own.
            return _text(getattr(value, own._meta.pk.attname), secret)
        meta = value._meta.concrete_model._meta  # type: ignore[union-attr]
        text = _plain(value.pk, secret)
        return f"{meta.label_lower}:={text}" if text[:1] in ("~", "=") else f"{meta.label_lower}:{text}"
    return None if value is None or value in ("", b"") else _text(value, secret)


def unwrapped(value: Any) -> Any:
    """Return the object in a lazy object. Load it if needed, which can make a query."""
    if isinstance(value, LazyObject):
        if value.__dict__["_wrapped"] is empty:
            value._setup()
        return value.__dict__["_wrapped"]
    return value


def _text(value: Any, secret: bool) -> str:
    text = _plain(value, secret)
    return f"={text}" if _LOOKS_LIKE_ANOTHER.match(text) else text


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
