"""Run every command and snippet of docs/billing word for word, page after page as its index lists them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.conf import DEFAULTS
from ratelimits.models import ConfigVersion
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import GapKind, ShardState
from tests.billing.push.fakes import LagoFake, options
from tests.support import forked
from tests.support.reports.invoices import account, spend
from tests.support.rows import rule
from tests.support.servers import TestServers
from tests.support.usage.traffic import at, flow, use
from tests.usage.ledger.test_gaps import keys, put_back

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "billing"
INDEX = (FOLDER / "index.md").read_text()
#: The text of each page, in the order of the index.
PAGES = {
    name: (FOLDER / f"{name}.md").read_text()
    for name in re.findall(r"^[a-z-]+$", INDEX.partition("```{toctree}")[2].partition("```")[0], re.MULTILINE)
}
#: Page, language and text of each snippet, in order.
SNIPPETS = [
    (name, language, text)
    for name, page in PAGES.items()
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
]


@pytest.fixture
def _october() -> None:
    """Make what the pages assume: 7 requests of an account whose plan includes 5; another one whose usage is stuck."""
    monthly = rule("monthly", bills=True, key_kind="caller")
    spend(account(included=5), "2025-10-10T12:00", 7, rule=monthly.pk, version=monthly.version)
    place = TotalKey("admitted", "acme", "", "requests", at("2025-10-10T12:00") // 10**6)
    process_totals.write("p1", {place: (1, 7)})
    spend(account("initech"), "2025-10-10T12:00")
    flow()
    assert home_shard("initech") != home_shard("acme")
    ShardState.objects.filter(shard=home_shard("initech")).update(watermark=at("2025-10-11"))


@pytest.fixture
def fork(redis_client: redis.Redis) -> Callable[[], None]:
    """Let a batch come again with two more requests in it than the ledger has."""

    def come_again() -> None:
        for _ in range(3):
            use("other", configuration=ConfigVersion.read("default")[0])
        seal()
        (key,) = keys(redis_client, "b:*")
        fields: Any = redis_client.hgetall(key)
        flow()
        put_back(redis_client, key, fields, cum=10, count=5)
        drain()

    return come_again


@pytest.fixture
def lago() -> Iterator[LagoFake]:
    """Run a fake of the billing system to which the pages push."""
    with LagoFake() as fake:
        yield fake
        assert fake.invalid == []


@pytest.mark.usefixtures("_october")
def test_the_pages_are_true_from_the_first_to_the_last(
    fork: Callable[[], None],
    lago: LagoFake,
    servers: TestServers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    django_db_blocker: DjangoDbBlocker,
) -> None:
    url = servers.url_of_database(str(connection.settings_dict["NAME"]))
    pushed = {"lago": options("lago", lago, "2025-10")}
    monkeypatch.setenv("STRIPE_KEY", "sk_test_1")
    monkeypatch.chdir(tmp_path)
    names: dict[str, dict[str, Any]] = {name: {} for name in PAGES}
    alone = True
    for page, language, text in SNIPPETS:
        if page == "quarantine":
            fork()
        if language == "python":
            exec(compile(text, f"docs/billing/{page}.md", "exec"), names[page])
            said = capsys.readouterr().out.splitlines()
            expected = re.findall(r"print\(.*\)  # (.*)", text)
            assert [line for line in expected if line not in said] == [], said
        else:
            for command in text.splitlines():
                python, script, *arguments = shlex.split(command)
                assert (python, script) == ("python", "manage.py")
                # The first runs in its own process; the others as manage.py runs them, without importing everything
                # again.
                if alone:
                    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
                    forked.run([sys.executable, str(ROOT / script), *arguments], env=environment, check=True)
                    alone = False
                else:
                    with (
                        override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": pushed}),
                        django_db_blocker.unblock(),  # an archive opens its own database
                    ):
                        execute_from_command_line([script, *arguments])
                capsys.readouterr()
    assert (tmp_path / "october.xlsx").stat().st_size > 0
    assert sum(int(event["properties"]["overage_quantity"]) for event in lago.taken) == 1
    assert list((tmp_path / "archive").iterdir())


def test_no_snippet_is_left_out() -> None:
    assert len(SNIPPETS) == sum(len(re.findall(r"^```", page, re.MULTILINE)) // 2 for page in PAGES.values()) > 0
    assert sorted(PAGES) == sorted(path.stem for path in FOLDER.iterdir() if path.stem != "index")


def test_every_kind_of_gap_is_explained() -> None:
    section = PAGES["gaps"].partition("\n## ")[0]
    explained = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(explained) == sorted([*GapKind.values, "witness"])


def test_every_setting_that_is_named_exists() -> None:
    named = set(re.findall(r"`([A-Z]+_[A-Z_]+)`", "\n".join([INDEX, *PAGES.values()])))
    assert named
    assert named - DEFAULTS.keys() == set()
