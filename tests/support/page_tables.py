"""Replace a table that a command writes into a page of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def write(page: Path, name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Replace the text between `<!-- name -->` and `<!-- /name -->` by a table.

    Raise ValueError if the page does not have these marks.
    """
    lines = [heads, ["---"] * len(heads), *rows]
    table = "".join(f"|{'|'.join(cell if cell == '---' else f' {cell} ' for cell in line)}|\n" for line in lines)
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, found = marks.subn(lambda old: old[1] + table + old[2], page.read_text())
    if not found:
        raise ValueError(f"{page} has no place for the table: it needs <!-- {name} --> and <!-- /{name} -->")
    page.write_text(text)
