"""HMACs with SIGNING_KEY, and their check with that and the keys that were in use before."""

from __future__ import annotations

import hashlib
import hmac

from ratelimits.conf import conf


def sign(text: str) -> str:
    """Return the HMAC-SHA256 of a text with SIGNING_KEY, in hexadecimal; "" without a key."""
    return _hmac(conf.SIGNING_KEY, text) if conf.SIGNING_KEY else ""


def key_id(key: str) -> str:
    """Return a short name of a key, which does not tell the key; "" without one."""
    return _hmac(key, "ratelimits key id")[:16] if key else ""


def holds(text: str, signature: str) -> bool:
    """Return whether a signature is that of SIGNING_KEY, or of one of SIGNING_KEYS_OLD; True if there is no key."""
    known = keys()
    return not known or any(hmac.compare_digest(_hmac(key, text), signature) for key in known)


def keys() -> list[str]:
    """Return the keys that a signature may be of, the present one first."""
    return [key for key in (conf.SIGNING_KEY, *conf.SIGNING_KEYS_OLD) if key]


def _hmac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
