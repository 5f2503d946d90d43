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

#: The beginning of a text that could be taken for a name of another kind.
_LOOKS_LIKE_ANOTHER = re.compile(r"[~=]|user:|api_key:|[a-z_]\w*\.\w+:", re.ASCII)


class NotAName(TypeError):
    """Raised for a value that is no name. The message says what the value is, without the value itself."""


def name_of(value: Any, own: type[Model] | None = None, *, secret: bool = False) -> str | None:
    """Return the name of a value; None for None and for an empty text, which name nobody.

    A row of a model is named by its primary key, with the label of its model in front ("shop.device:3"). Rows of the
    model `own` have no label. A whole number, a text and a UUID are names themselves. If `secret` is true, texts are
    secrets: their names are digests. Raise NotAName for any other value, such as True, a dict or a coroutine.
    """
    if isinstance(value, Model):
        if value.pk is None:
            raise NotAName(f"a {value._meta.label} that is not saved")
        if own is not None and isinstance(value, own):
            return _text(value.pk, secret)
        meta = value._meta.concrete_model._meta  # type: ignore[union-attr]
        return f"{meta.label_lower}:{_plain(value.pk, secret)}"
    return None if value is None or value in ("", b"") else _text(value, secret)


def _text(value: Any, secret: bool) -> str:
    text = _plain(value, secret)
    return f"={text}" if _LOOKS_LIKE_ANOTHER.match(text) else text


def _plain(value: Any, secret: bool) -> str:
    """Return a whole number, a UUID or a text as a text. Raise NotAName for other values."""
    if isinstance(value, (int, UUID)) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError as error:  # Python converts no number with so many digits
            raise NotAName("a number with thousands of digits") from error
    if isinstance(value, (str, bytes)):
        if secret:
            return digest(value)
        try:
            return value if isinstance(value, str) else value.decode()
        except UnicodeDecodeError as error:
            raise NotAName("bytes that are not UTF-8") from error
    raise NotAName(f"a value of the type {type(value).__qualname__}")


def digest(secret: str | bytes) -> str:
    """Return a digest of a text, from which nobody can find the text."""
    data = secret.encode(errors="surrogatepass") if isinstance(secret, str) else secret
    return hashlib.blake2b(data, digest_size=12).hexdigest()
