"""The code blocks of the documentation."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ROOT / "docs" / "zh"
#: The pages in English. The code blocks of the Chinese pages are copies of theirs.
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.is_relative_to(CHINESE)),
)


class Snippet(NamedTuple):
    page: str  #: the page's path in the repository
    language: str
    text: str


def snippets(pages: Iterable[Path] = PAGES) -> list[Snippet]:
    """Return the code blocks of these pages that name a language, in order."""
    return [
        Snippet(str(page.relative_to(ROOT)), language, textwrap.dedent(text))
        for page in pages
        for _indent, language, text in re.findall(
            r"^( *)```(\w+)\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL
        )
    ]


def snippet(phrase: str) -> Snippet:
    """Return the only code block that contains this phrase."""
    (found,) = [one for one in snippets() if phrase in one.text]
    return found
