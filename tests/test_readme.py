"""Test that README.md is short, that what it shows is there, and that the links of all pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.decide.running import script
from tests.support.servers import TestServers

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
#: The most words that a reader of README has to look at.
MAX_WORDS = 700


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n.*?^```$", README, re.MULTILINE | re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS


def test_it_says_first_what_the_app_is_in_one_sentence() -> None:
    title, first, *_others = README.split("\n\n")
    assert title == "# ratelimits"
    assert first.startswith("**ratelimits is a Django app ")
    assert first.endswith(".**")
    assert first.count(".") == 1


def test_it_shows_a_rule_a_refusal_and_a_report() -> None:
    pictures = re.findall(r"^!\[[^]]+\]\((.*)\)$", README, re.MULTILINE)
    assert pictures == [f"docs/pages/{name}.readme.webp" for name in ("new-rule", "refused", "report")]
    for picture in pictures:
        content = (ROOT / picture).read_bytes()
        assert (content[:4], content[8:12]) == (b"RIFF", b"WEBP")
        assert len(content) < 30_000


def test_its_settings_are_those_of_the_page_whose_steps_a_test_does() -> None:
    _rates, settings = blocks("python")
    assert settings.startswith("```python\n# shop/settings.py\nINSTALLED_APPS = [\n")
    assert f"\n{settings}\n" in (ROOT / "docs" / "quickstart.md").read_text()


def test_its_settings_of_rates_alone_limit_a_project_without_the_app(tmp_path: Path, servers: TestServers) -> None:
    names: dict[str, Any] = {}
    code = blocks("python")[0].removeprefix("```python\n").removesuffix("```")
    exec(compile(code.replace("redis://127.0.0.1:6379/1", servers.redis.url), "README.md", "exec"), names)
    rates = names["REST_FRAMEWORK"]["DEFAULT_THROTTLE_RATES"]
    assert rates == {"anon": "20/min", "user": "10/5min"}
    settings = {"CACHES": names["CACHES"], "REST_FRAMEWORK": names["REST_FRAMEWORK"], "RATELIMITS": {}}
    text = """
        print([status for status, _fields in get("default", 11)])
        print([status for status, _fields in get("default", 11, "ada")])
    """
    printed = script(tmp_path, text, settings)
    assert printed.splitlines() == [f"{[200] * 10 + [429]}"] * 2


def test_each_of_the_two_set_up_commands_stands_alone() -> None:
    demo, tests = (block.removeprefix("```sh\n").removesuffix("```") for block in blocks("sh"))
    for command in (demo, tests):
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && ")
    assert demo.endswith(".venv/bin/python manage.py demo\n")
    assert tests.endswith(".venv/bin/python -m pytest -n auto\n")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    targets = [
        (page, path, anchor)
        for page in pages
        for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text())
    ]
    assert targets
    lost = [
        f"{page.name}: {path}#{anchor}"
        for page, path, anchor in targets
        for target in [page.parent / path if path else page]
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert lost == []
