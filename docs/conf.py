"""Build the documentation as a site: `sphinx-build --fail-on-warning -b html docs build/docs`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import django
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
django.setup()

project = "ratelimits"
copyright = "The ratelimits authors"  # noqa: A001  (Sphinx's name)
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "ratelimits"
html_static_path = ["static"]
html_css_files = ["site.css"]
exclude_patterns = ["README.md"]
#: Headings get the anchors that they have on GitHub, so that a link works in both places.
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Some examples have `…` or placeholders, which Pygments cannot parse. Its warning about them is not useful.
suppress_warnings = ["misc.highlighting_failure"]


def _link_inside(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to files beside the folder `docs` lead to their copies in the site."""
    up = "../" * name.count("/")
    for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        source[0] = source[0].replace(f"]({up}../{file}", f"]({up}{file.lower()}")
    if name == "index":
        source[0] += _list_of_new_pages(source[0])


def _list_of_new_pages(index: str) -> str:
    """Return a list of the pages that docs/index.md does not list yet, so that people find them in the site too."""
    listed = {"index", "README", *index.splitlines()}
    pages = sorted(page.stem for page in HERE.glob("*.md") if page.stem not in listed)
    return "\n".join(["", "```{toctree}", ":caption: More", *pages, "```", ""]) if pages else ""


def _list_arguments(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Let each argument of a docstring begin a line of its own."""
    lines[:] = [f"| {line}" if re.match(r"\w+ {2,}\S", line) else line for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_inside)
    app.connect("autodoc-process-docstring", _list_arguments)
