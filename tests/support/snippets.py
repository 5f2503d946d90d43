"""The code blocks of the documentation."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


class Snippet(NamedTuple):
    page: str  #: the page's path in the repository
    language: str
    text: str


def snippets() -> list[Snippet]:
    """Return the code blocks of all pages that name a language, in order."""
    return [
        Snippet(str(page.relative_to(ROOT)), language, textwrap.dedent(text))
        for page in PAGES
        for _indent, language, text in re.findall(
            r"^( *)```(\w+)\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL
        )
    ]


def snippet(phrase: str) -> Snippet:
    """Return the only code block that contains this phrase."""
    (found,) = [one for one in snippets() if phrase in one.text]
    return found
