"""Replacing names in any value: in columns that are a name, and in texts that people or the app wrote about it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from ratelimits.salts import Pseudonyms

#: A key in a longer text.
_KEY = re.compile(r"[a-z_]{1,15}:[^\s,;|/\"'()<>]+")
#: What is no end of a name, before it and after it.
_BEFORE, _AFTER = re.compile(r"(?:[\w@:+-]|\w\.)\Z"), re.compile(r"[\w@:+-]|\.\w")


class Scrubber:
    """Replaces the names of a customer.

    `words` are its account texts and what else names it, such as its name and its e-mail addresses. `keys` are its
    keys. A word of digits is replaced only where it is the whole value: in a longer text it can be any number.
    """

    def __init__(self, pseudonyms: Pseudonyms, words: Collection[str], keys: Collection[str]) -> None:
        self._pseudonyms, self._words, self._keys = pseudonyms, frozenset(words), frozenset(keys)
        #: The words that are replaced in longer texts, the longest first.
        self.searchable = sorted((word for word in self._words if word and not word.isdigit()), key=len, reverse=True)

    def __call__(self, value: Any) -> Any:
        """Return a value with pseudonyms: a text, or the texts in lists and objects of JSON."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self(item) for item in value]
        if isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        return value

    def of_json(self, text: str) -> str:
        """Return a text that is perhaps JSON, with pseudonyms."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return self._text(text)
        replaced = self(content)
        return text if replaced == content else json.dumps(replaced, separators=(",", ":"), ensure_ascii=False)

    def cut(self, text: str, longest: int) -> str:
        """Return a text with pseudonyms, cut to the length of its column."""
        return self._text(text)[:longest]

    def _text(self, text: str) -> str:
        if text in self._keys:
            return self._pseudonyms.key(text)
        if text in self._words:
            return self._pseudonyms.account(text)
        replaced = _KEY.sub(lambda found: self._of_key(found[0]), text)
        for word in self.searchable:
            if word in replaced:
                replaced = _with_each(replaced, word, self._pseudonyms.account(word))
        return replaced

    def _of_key(self, found: str) -> str:
        name = found.rstrip(".")
        return self._pseudonyms.key(name) + found[len(name) :] if name in self._keys else found


def _with_each(text: str, word: str, other: str) -> str:
    """Return a text with another word wherever `word` stands for itself, not within a longer word."""
    parts, begin, end = [], 0, 0
    while (found := text.find(word, end)) >= 0:
        end = found + 1
        if not _BEFORE.search(text[max(found - 2, 0) : found]) and not _AFTER.match(text, found + len(word)):
            parts += [text[begin:found], other]
            begin = end = found + len(word)
    return "".join([*parts, text[begin:]])
