"""HMACs made with SIGNING_KEY, and their verification with this key and with SIGNING_KEYS_OLD."""

from __future__ import annotations

import hashlib
import hmac

from ratelimits.conf import conf


def sign(text: str) -> str:
    """Return the HMAC-SHA256 of a text with SIGNING_KEY, in hexadecimal; "" without a key."""
    return _hmac(conf.SIGNING_KEY, text) if conf.SIGNING_KEY else ""


def key_id(key: str) -> str:
    """Return a short name of a key, 16 hexadecimal digits; "" for no key. The key cannot be found from its name."""
    return _hmac(key, "ratelimits key id")[:16] if key else ""


def error_of(text: str, signature: str) -> str:
    """Return what is wrong with a text's signature, as part of a sentence.

    Return "" if the signature is valid, or if there is no key to check it. A signature is valid if it was made with
    SIGNING_KEY or a key of SIGNING_KEYS_OLD. If SIGNING_KEYS_OLD contains "", a text without a signature is valid, too.
    """
    keys = [key for key in (conf.SIGNING_KEY, *conf.SIGNING_KEYS_OLD) if key]
    if not keys or any(hmac.compare_digest(_hmac(key, text).encode(), signature.encode()) for key in keys):
        return ""
    if signature:
        return "its signature was made neither with SIGNING_KEY nor with one of SIGNING_KEYS_OLD"
    if "" in conf.SIGNING_KEYS_OLD:
        return ""
    return (
        "it has no signature: either somebody removed the signature, or there was no SIGNING_KEY when it was written"
        ' (if so, add "" to SIGNING_KEYS_OLD)'
    )


def has_key() -> bool:
    """Return whether there is a key. Without a key, signatures are not verified."""
    return any((conf.SIGNING_KEY, *conf.SIGNING_KEYS_OLD))


def _hmac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
