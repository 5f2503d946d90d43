"""Write the list of columns in docs/exports/columns.md: `python -m tests.billing.reports.exports.columns`."""

from __future__ import annotations

import re
from pathlib import Path

from ratelimits.billing.reports.rows import TABLE

PAGE = Path(__file__).parents[4] / "docs" / "exports" / "columns.md"
BEGIN, END = "<!-- columns -->\n", "<!-- /columns -->"


def table() -> str:
    """Return the list as Markdown."""
    rows = (f"| `{column.name}` | {column.kind.value} | {column.meaning} |\n" for column in TABLE)
    return "".join(["| column | kind | meaning |\n", "|---|---|---|\n", *rows])


def written(page: str) -> str:
    """Return a page with the list as it is now."""
    return re.sub(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _found: table(), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
