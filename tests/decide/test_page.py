"""Do what docs/decide.md says, word for word, and look that its table names the settings that work without the app."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from ratelimits.conf import DECIDING
from tests.decide.running import ROOT, script, settings_of
from tests.support.servers import TestServers

PAGE = (ROOT / "docs" / "decide.md").read_text()
SETTINGS, VIEWS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_settings_are_those_of_readme() -> None:
    assert f"```python\n{SETTINGS}```" in (ROOT / "README.md").read_text()


def test_the_view_has_both_rates(tmp_path: Path, servers: TestServers) -> None:
    (tmp_path / "views.py").write_text(VIEWS)
    text = """
        sys.path.insert(0, "")
        import views
        urlpatterns.append(path("search/", views.Search.as_view()))
        now = 1_800_000_000
        for throttle in views.Search.throttle_classes:
            throttle.timer = staticmethod(lambda: now)
        first = get("search", 3)
        now += 1
        print(json.dumps([first, get("search", 1)]))
    """
    first, later = json.loads(script(tmp_path, text, settings_of(servers.redis.url)))
    assert [status for status, _fields in first] == [200, 200, 429]
    assert first[0][1]["RateLimit-Policy"] == '"burst";q=2;w=1, "sustained";q=100;w=86400'
    assert first[2][1]["Retry-After"] == "1"
    assert [status for status, _fields in later] == [200]


def test_the_table_names_the_settings_that_work_without_the_app() -> None:
    table = PAGE.partition("| settings | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == DECIDING


def test_these_are_the_settings_that_code_of_this_floor_reads() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["type"] == "floors")
    above = {name for floor in ("limit", "count", "bill") for name in contract[floor]}
    read = set()
    for room in contract["decide"]:
        place = ROOT / room.replace(".", "/")
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            if not any(f"{module}.".startswith(f"{name}.") for name in above):
                read |= set(re.findall(r"\bconf\.([A-Z_]+)", file.read_text()))
    assert read - {"NAME"} == DECIDING  # a docstring says `conf.NAME`
