"""Test rules in the tests of a project that uses the app, under Django's own runner and under pytest-django."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.fresh import Project
from tests.support.servers import TestServers

_TESTS = """\
import asyncio
import threading

from django.db import connection, transaction
from django.test import AsyncClient, TestCase, TransactionTestCase

from ratelimits import rules
from ratelimits.models import Rule

LIMIT = {"name": "burst", "algorithm": "fixed_window", "capacity": 2, "period": 3600, "key_kind": "ip"}


def statuses(client, times=4):
    return [client.get("/hello/").status_code for _time in range(times)]


USED_UP = [200, 200, 429, 429]


class Common:
    def test_a_rule_is_in_force_at_once(self):
        self.assertEqual(statuses(self.client), [200] * 4)
        Rule.objects.create(**LIMIT)
        self.assertEqual(statuses(self.client), USED_UP)

    def test_an_edit_is_in_force_at_once(self):
        rule = Rule.objects.create(**LIMIT)
        self.assertEqual(statuses(self.client), USED_UP)
        Rule.objects.update(mode="off")
        self.assertEqual(self.edited(), [200] * 4)
        rule.refresh_from_db()
        rule.delete()
        self.assertEqual(statuses(self.client), [200] * 4)

    def test_other_numbers_under_the_same_version(self):
        Rule.objects.create(**{**LIMIT, "capacity": 1})
        self.assertEqual(statuses(self.client, 2), [200, 429])

    def test_an_edit_in_a_block_holds_from_its_end(self):
        with transaction.atomic():
            Rule.objects.create(**LIMIT)
        self.assertEqual(statuses(self.client), USED_UP)

    def test_without_rules_nothing_is_refused(self):
        self.assertEqual(statuses(self.client), [200] * 4)


class InTestCase(Common, TestCase):
    def edited(self):
        return statuses(self.client)

    def test_what_is_rolled_back_is_out_of_force(self):
        Rule.objects.create(**LIMIT)
        try:
            with transaction.atomic():
                Rule.objects.update(capacity=0, mode="off")
                statuses(self.client)
                raise ValueError
        except ValueError:
            pass
        self.assertEqual(statuses(self.client)[-1], 429)

    def test_the_rules_are_not_among_the_queries_of_a_test(self):
        Rule.objects.create(**LIMIT)
        with self.assertNumQueries(0):
            self.assertEqual(statuses(self.client), USED_UP)

    def test_a_thread_decides_by_them_too(self):
        Rule.objects.create(**LIMIT)
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(statuses(self.client)))
        thread.start()
        thread.join()
        self.assertEqual(seen, USED_UP)

    async def test_async(self):
        await Rule.objects.acreate(**LIMIT)
        client = AsyncClient()
        self.assertEqual([(await client.get("/hello/")).status_code for _time in range(4)], USED_UP)
        await Rule.objects.aupdate(mode="off")
        self.assertEqual((await client.get("/hello/")).status_code, 200)

    def test_a_reload_reads_the_rules_of_this_test(self):
        Rule.objects.create(**{**LIMIT, "name": "first"})
        self.assertEqual([row.name for row in rules.reload().rows.rules.values()], ["first"])

    def test_a_reload_does_not_keep_the_rules_of_another_test(self):
        Rule.objects.create(**{**LIMIT, "name": "second"})
        self.assertEqual([row.name for row in rules.reload().rows.rules.values()], ["second"])

    async def test_areload_reads_the_rules_of_this_test(self):
        await Rule.objects.acreate(**{**LIMIT, "name": "third"})
        self.assertEqual([row.name for row in (await rules.areload()).rows.rules.values()], ["third"])

    async def test_acheck(self):
        from ratelimits.quota import checking as quota
        from ratelimits.identity import Identity

        await Rule.objects.acreate(**LIMIT)
        who = Identity(address="ip:192.0.2.1")
        self.assertEqual([(await quota.acheck(who)).allowed for _time in range(3)], [True, True, False])


class WithTestData(TestCase):
    @classmethod
    def setUpTestData(cls):
        cls.rule = Rule.objects.create(**LIMIT)

    def test_one(self):
        self.assertEqual(statuses(self.client), USED_UP)

    def test_two(self):
        self.assertEqual(statuses(self.client), USED_UP)
        self.rule.mode = "off"
        self.rule.save()
        self.assertEqual(statuses(self.client), [200] * 4)

    def test_three(self):
        self.assertEqual(statuses(self.client), USED_UP)

    async def test_the_event_loop_is_the_first_to_ask(self):
        from ratelimits.quota import checking as quota
        from ratelimits.identity import Identity

        who = Identity(address="ip:192.0.2.1")
        self.assertEqual([(await quota.acheck(who)).allowed for _time in range(3)], [True, True, False])


class InTransactionTestCase(Common, TransactionTestCase):
    # Committed rows count in the namespace of the settings, from one test to the next.
    def setUp(self):
        self.client.defaults["REMOTE_ADDR"] = f"192.0.2.{sum(map(ord, self.id())) % 250}"

    def edited(self):
        self.client.defaults["REMOTE_ADDR"] = "198.51.100.1"  # a refusal may be repeated for a second
        return statuses(self.client)
"""
_PYTEST = """\
import pytest

from ratelimits.models import Rule
from shop.tests import LIMIT, USED_UP, statuses


@pytest.mark.parametrize("again", range(3))
def test_db(db, client, again):
    Rule.objects.create(**LIMIT)
    assert statuses(client) == USED_UP


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("again", range(3))
def test_committed(client, again):
    Rule.objects.create(**LIMIT)
    client.defaults["REMOTE_ADDR"] = f"192.0.2.{again}"
    assert statuses(client) == USED_UP


async def test_async(rule, async_client):
    assert [(await async_client.get("/hello/")).status_code for _time in range(4)] == USED_UP


@pytest.fixture
def rule(db):
    return Rule.objects.create(**LIMIT)
"""


#: SQLite in memory and in a file, if the tests run on SQLite.
DATABASES = ["postgres"] if os.environ.get("RATELIMITS_TEST_DATABASE") == "postgres" else ["memory", "file"]


@pytest.fixture(params=DATABASES)
def project(request: pytest.FixtureRequest, tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    default: dict[str, Any] = made.settings["DATABASES"]["default"]
    # Tables made from the models: migrations make the same ones, but take longer.
    default["TEST"] = {"MIGRATE": False}
    if request.param == "file":
        default["TEST"]["NAME"] = str(tmp_path / "test.sqlite3")
    made.settings["TEST_RUNNER"] = "ratelimits.testing.runner.QuotaTestRunner"
    made.write("shop/tests.py", _TESTS)
    return made


def ran(said: str) -> int:
    [number] = re.findall(r"Ran (\d+) tests", said)
    return int(number)


def test_under_djangos_runner(project: Project, redis_client: redis.Redis) -> None:
    said = project.manage("test", "--noinput")
    assert ran(said) == 22, said
    # Keys that a test leaves behind expire.
    assert [key for key in redis_client.keys("rl:1:fresh.*") if redis_client.ttl(key) < 0] == []


def test_in_another_order_and_in_parallel(project: Project) -> None:
    assert ran(project.manage("test", "--noinput", "--reverse")) == 22
    project.write("shop/tests_more.py", _TESTS)
    assert ran(project.manage("test", "--noinput", "--parallel", "2", "--pattern", "tests*.py")) == 44


def test_under_pytest_django(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nDJANGO_SETTINGS_MODULE = settings\nasyncio_mode = auto\n")
    project.write("shop/test_pytest.py", _PYTEST)
    assert "7 passed" in project.run(
        "-m", "pytest", "-q", "-p", "ratelimits.pytest_plugin", "-p", "no:randomly", "shop/test_pytest.py"
    )
