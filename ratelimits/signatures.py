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


def wrong(text: str, signature: str) -> str:
    """Return what is wrong with a signature, as a part of a sentence; "" if it holds, or if there is no key.

    It may be of SIGNING_KEY or of any of SIGNING_KEYS_OLD, of which an empty one stands for no signature.
    """
    known = [key for key in (conf.SIGNING_KEY, *conf.SIGNING_KEYS_OLD) if key]
    if not known or any(hmac.compare_digest(_hmac(key, text).encode(), signature.encode()) for key in known):
        return ""
    if signature:
        return "its signature is not the one of SIGNING_KEY, nor of one of SIGNING_KEYS_OLD"
    if "" in conf.SIGNING_KEYS_OLD:
        return ""
    return "it has no signature: it was taken away, or there was no SIGNING_KEY yet, which SIGNING_KEYS_OLD can say"


def checked() -> bool:
    """Return whether there is a key, so that signatures are looked at."""
    return any((conf.SIGNING_KEY, *conf.SIGNING_KEYS_OLD))


def _hmac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
