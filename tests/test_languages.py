"""Test that the Chinese catalogue is complete, fits the English texts, and is what the admin shows."""

from __future__ import annotations

import gettext
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from django.test import Client

import ratelimits
from tests.support.snippets import snippets

APP = Path(ratelimits.__file__).parent
CATALOGUE = Path("locale") / "zh_Hans" / "LC_MESSAGES"
#: Placeholders of both formats, and the tags of HTML.
_PLACEHOLDER = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w*[^}]*\}|</?\w+")


def texts(path: Path) -> dict[str, str]:
    """Return the compiled translations by their English text; plural forms count as texts of their own."""
    with path.open("rb") as file:
        entries = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    found = {}
    for english, translated in entries.items():
        name = english[0] if isinstance(english, tuple) else english
        found[name] = translated
    return {english: translated for english, translated in found.items() if english}


def test_each_translation_has_the_placeholders_of_the_english_text() -> None:
    for english, translated in texts(APP / CATALOGUE / "django.mo").items():
        assert sorted(_PLACEHOLDER.findall(english)) == sorted(_PLACEHOLDER.findall(translated)), english


def test_nothing_is_left_in_english_but_names() -> None:
    same = {english for english, translated in texts(APP / CATALOGUE / "django.mo").items() if english == translated}
    assert {text for text in same if " " in text} == set()


@pytest.mark.system
def test_the_catalogue_has_every_text_of_the_code(tmp_path: Path) -> None:
    """Extract the texts again: no text may be new, out of date or untranslated."""
    copy = tmp_path / "ratelimits"
    shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__", "*.mo"))
    command = [sys.executable, "-m", "django", "makemessages", "--locale", "zh_Hans", "--no-location", "--no-obsolete"]
    # The command needs no settings, and those of the tests cannot be imported from there.
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    subprocess.run(command, cwd=copy, env=environment, check=True, capture_output=True)
    for wrong in ("--untranslated", "--only-fuzzy"):
        left = subprocess.run(
            ["msgattrib", wrong, "--no-obsolete", "--no-wrap", str(copy / CATALOGUE / "django.po")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert re.findall(r'^msgid "(.+)"$', left, re.MULTILINE) == []


@pytest.mark.system
def test_the_compiled_catalogue_is_the_newest(tmp_path: Path) -> None:
    compiled = tmp_path / "django.mo"
    subprocess.run(["msgfmt", "--check", "-o", str(compiled), str(APP / CATALOGUE / "django.po")], check=True)
    assert texts(compiled) == texts(APP / CATALOGUE / "django.mo")


@pytest.mark.django_db
@pytest.mark.parametrize(("language", "expected"), [("zh-hans", "规则"), ("en", "Rules")])
def test_the_admin_speaks_the_language_of_the_browser(admin_client: Client, language: str, expected: str) -> None:
    page = admin_client.get("/admin/ratelimits/rule/", headers={"accept-language": language})
    assert expected in page.content.decode()
    assert page.headers["Content-Language"] == language


_ADMIN = sorted((APP.parent / "docs" / "admin").glob("*.md"))


@pytest.mark.parametrize("page", _ADMIN, ids=lambda page: page.stem)
def test_the_operators_guide_in_chinese_has_every_heading_row_picture_and_code_block(page: Path) -> None:
    chinese = APP.parent / "docs" / "zh" / "admin" / page.name
    for sign in ("#", r"\|", r"!\["):
        counts = [len(re.findall(f"^{sign}", path.read_text(), re.MULTILINE)) for path in (page, chinese)]
        assert counts[0] == counts[1], f"lines of {chinese.name} that begin with {sign}"
    assert [one[1:] for one in snippets([chinese])] == [one[1:] for one in snippets([page])]


def test_the_chinese_start_page_has_commands_of_the_english_pages() -> None:
    own = snippets([APP.parent / "docs" / "zh" / "index.md"])
    assert {one.text for one in own} <= {one.text for one in snippets()}
    assert own


def test_the_chinese_pages_use_the_words_of_the_admin() -> None:
    """Look for each name of a page or action in italics among the texts of the admin."""
    known = set(texts(APP / CATALOGUE / "django.mo").values())
    pages = sorted((APP.parent / "docs" / "zh" / "admin").glob("*.md"))
    named = {name for page in pages for name in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", page.read_text())}
    assert sorted(named - known) == []
