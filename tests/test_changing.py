"""docs/changing.md and CONTRIBUTING.md name what exists, and no page refers to one that a reader does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.changed import PACKAGE, ROOT, listed

PAGES = (ROOT / "docs" / "changing.md", ROOT / "CONTRIBUTING.md")
TEXTS = {".py", ".lua", ".md", ".html", ".js", ".css", ".toml", ".yml", ".json", ".txt"}
SECTIONS = re.findall(r"^## (.+)$", PAGES[0].read_text(), re.MULTILINE)


def exists(path: str) -> bool:
    # What is to be written has no name yet, but its folder is there.
    path = path.partition("<")[0]
    return any((root / path).exists() for root in (PACKAGE, ROOT, ROOT / "tests" / "reports"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    named = re.findall(r"`([\w./<>-]+\.(?:py|lua|md|yml)|\.ci/run|[\w]+(?:/[\w.]+)+/?)`", page.read_text())
    named = [path for path in named if not path.startswith("urn:")]
    assert len(named) > 5
    assert [path for path in named if not exists(path)] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_every_place_of_a_list_is_there(section: str) -> None:
    assert [path for path in listed(section) if not exists(path)] == []


def test_the_page_has_a_list_for_each_common_change() -> None:
    assert [section for section in SECTIONS if listed(section)] == [
        "A new algorithm",
        "A column of the reports",
        "A setting",
        "A key in Redis",
        "What delays an edit",
        "An export format",
        "A text that users read",
    ]


def test_the_workflow_calls_the_script_that_everybody_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step]
    assert commands == [".ci/run"]


def test_nothing_refers_to_a_document_that_is_not_here() -> None:
    # Put together, so that this file does not have them.
    word = re.compile(r"\b(" + "|".join(("DES" + "IGN", "CON" + "TRACT", "HO" + "USE")) + r")\b")
    folders = ("ratelimits", "project", "tests", "benchmarks", "docs", "templates", ".ci", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    files += [path for path in ROOT.iterdir() if path.suffix in TEXTS]
    assert len(files) > 500
    assert [str(path.relative_to(ROOT)) for path in files if word.search(path.read_text())] == []
