"""Read and replace tables that commands write into pages of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def _marks(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


def read(page: Path, name: str) -> list[list[str]]:
    """Return the rows of the table between `<!-- name -->` and `<!-- /name -->`, without its heads."""
    found = _marks(name).search(page.read_text())
    lines = found[2].splitlines()[2:] if found else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write(page: Path, name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Replace the text between `<!-- name -->` and `<!-- /name -->` by a table.

    Raise ValueError if the page does not have these marks.
    """
    lines = [heads, ["---"] * len(heads), *rows]
    table = "".join(f"|{'|'.join(cell if cell == '---' else f' {cell} ' for cell in line)}|\n" for line in lines)
    text, found = _marks(name).subn(lambda old: old[1] + table + old[3], page.read_text())
    if not found:
        raise ValueError(f"{page} has no place for the table: it needs <!-- {name} --> and <!-- /{name} -->")
    page.write_text(text)
