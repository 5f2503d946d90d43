"""Test that each process reads the meters of plans, whoever edits a plan, and wherever the editor dies."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import QuerySet

from ratelimits import as_code, rules
from ratelimits.billing.models import PlanPrice
from ratelimits.billing.reports.terms.price_book import PriceBook
from ratelimits.conf import conf
from ratelimits.engine.server import version_in_force
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, Plan, PlanInclusion, Rule
from ratelimits.models.accounts import plan_parts
from ratelimits.models.raw.adoption import difference_from_history
from ratelimits.models.versioned import versioned_models
from ratelimits.rules.loader import Loader
from ratelimits.rules.query_thread import RulesUnavailable
from tests.rules.conftest import Clock
from tests.support import forked
from tests.support.rows import rule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity(user="user:1")
METERS = ("requests", "tokens", "pages")
#: The other required values of each part of a plan.
VALUES: dict[Any, dict[str, int]] = {PlanInclusion: {"quantity": 1}, PlanPrice: {"unit_price": 1}}
#: A process that makes a plan's price 2, and that perhaps dies.
EDITOR = """
import os, signal, sys
import django
django.setup()
from django.db import transaction
from ratelimits.models import Plan, versions
from ratelimits.billing.models import PlanPrice

def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "after the commit":
    versions.publish_version = die
with transaction.atomic():
    PlanPrice.objects.update_or_create({"unit_price": 2}, plan=Plan.objects.get(), meter="priced")
    if sys.argv[1] == "before the commit":
        die()
"""


@pytest.fixture
def edit_elsewhere(servers: TestServers) -> Callable[[str], None]:
    """Return a function that starts the editor. It takes the moment at which the editor dies: "never" for none."""
    environment = {
        **os.environ,
        "DATABASE_URL": servers.url_of_database(str(connection.settings_dict["NAME"])),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }

    def run(dies: str) -> None:
        done = forked.run([sys.executable, "-c", EDITOR, dies], env=environment, cwd=forked.ROOT)
        assert done.returncode == (0 if dies == "never" else -signal.SIGKILL)

    return run


def price_now() -> Any:
    """Return the price of the plan, as a report reads it that begins now."""
    recorded = PriceBook("default").of("pro", time.time_ns() // 1000)
    return recorded and recorded["meters"]["priced"]["tiers"]


class TestAnotherProcess:
    def test_the_first_price_is_seen_at_once(
        self, check: Callable[..., Any], edit_elsewhere: Callable[[str], None]
    ) -> None:
        Plan.objects.create(name="Pro", slug="pro", currency="EUR")
        rule(capacity=100)
        check(WHO)
        assert not rules.current().rows.plan_meters
        assert not price_now()
        edit_elsewhere("never")
        check(WHO)
        assert rules.current().rows.plan_meters == {"priced"}
        first = price_now()
        PlanPrice.objects.update(unit_price=1)
        assert price_now() != first
        edit_elsewhere("never")
        assert price_now() == first

    def test_an_edit_whose_editor_died_before_redis_knew_is_read_at_the_next_refresh(
        self, loader: Loader, clock: Clock, edit_elsewhere: Callable[[str], None]
    ) -> None:
        Plan.objects.create(name="Pro", slug="pro", currency="EUR")
        before, published = loader.current(), version_in_force()
        edit_elsewhere("after the commit")
        assert (ConfigVersion.read("default")[0], version_in_force()) == (before.version + 1, published)
        assert loader.current() is before
        clock.seconds += conf.RELOAD_INTERVAL + 1
        loader.current()
        loader._thread.submit(int).result()  # after the refresh that was started
        assert loader.current().rows.plan_meters == {"priced"}

    def test_an_edit_whose_editor_died_before_the_commit_is_none(
        self, loader: Loader, edit_elsewhere: Callable[[str], None]
    ) -> None:
        Plan.objects.create(name="Pro", slug="pro", currency="EUR")
        before = loader.current()
        edit_elsewhere("before the commit")
        assert loader.reload() is before
        assert (ConfigVersion.read("default")[0], PlanPrice.objects.count()) == (before.version, 0)


class Edits:
    """Random edits of plans. Nothing tells a loader of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def make(self) -> None:
        """Make one edit."""
        part = self._rng.choice(list(VALUES))
        plan, row = self._rng.choice([*Plan.objects.all(), None]), self._rng.choice([*part.objects.all(), None])
        if plan is None:
            Plan.objects.create(name="P", slug=f"p{self._rng.randrange(10**9)}", currency="EUR")
        elif row is None:
            self._add(part, plan)
        else:
            choices: list[Callable[..., Any]] = [self._save, self._update, self._delete, self._delete_meter]
            choices += [self._take_back, self._raw, lambda *_row: plan.delete(), lambda *_row: self._load(plan)]
            self._rng.choice(choices)(part, row)

    def _free(self, part: Any, plan: int) -> str | None:
        taken = part.objects.filter(plan=plan).values_list("meter", flat=True)
        return self._rng.choice([meter for meter in METERS if meter not in taken] or [None])

    def _add(self, part: Any, plan: Plan) -> None:
        if meter := self._free(part, plan.pk):
            part.objects.create(plan=plan, meter=meter, **VALUES[part])

    def _save(self, part: Any, row: Any) -> None:
        row.meter = self._free(part, row.plan_id) or row.meter
        row.save()

    def _update(self, part: Any, row: Any) -> None:
        part.objects.filter(pk=row.pk).update(meter=self._free(part, row.plan_id) or row.meter)

    def _delete(self, part: Any, row: Any) -> None:
        row.delete()

    def _delete_meter(self, part: Any, row: Any) -> None:
        part.objects.filter(meter=row.meter).delete()

    def _take_back(self, part: Any, row: Any) -> None:
        with transaction.atomic():
            row.delete()
            transaction.set_rollback(True)

    def _raw(self, part: Any, row: Any) -> None:
        QuerySet(part).filter(pk=row.pk).update(meter=self._free(part, row.plan_id) or row.meter)
        call_command("ratelimits_reload", verbosity=0)

    def _load(self, plan: Plan) -> None:
        entry = {"name": plan.name, "currency": "EUR", "includes": {self._rng.choice(METERS): 5}}
        entry |= self._rng.choice([{}, {"prices": {self._rng.choice(METERS): {"unit_price": "3"}}}])
        as_code.load({"plans": {plan.slug: entry}, "rules": []}, "default")


@pytest.mark.parametrize("seed", range(3))
def test_after_any_edits_a_process_knows_what_a_new_one_reads(loader: Loader, clock: Clock, seed: int) -> None:
    edits, seen = Edits(random.Random(seed)), set()
    for _number in range(25):
        version = loader.current().version
        edits.make()
        stored = {meter for part in VALUES for meter in part.objects.values_list("meter", flat=True)}
        snapshot = loader.reload()
        assert snapshot.rows.plan_meters == Loader(clock).current().rows.plan_meters == stored
        assert snapshot.version == ConfigVersion.read("default")[0] >= version
        assert not any(any(difference_from_history(model, "default")) for model in versioned_models())
        seen.add(frozenset(stored))
    assert len(seen) > 3


def test_the_parts_of_plans_are_the_tables_that_name_a_plan_and_a_meter() -> None:
    about_plans = {relation.related_model for relation in Plan._meta.related_objects}
    named = {model for model in about_plans & {*versioned_models()} if hasattr(model, "meter")}
    assert {*plan_parts()} == {*VALUES} == named - {Rule}


@contextmanager
def without_table(model: Any) -> Iterator[None]:
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO away")
        try:
            yield
        finally:
            cursor.execute(f"ALTER TABLE away RENAME TO {table}")


def test_a_part_that_cannot_be_read_is_said_and_the_rules_in_force_stay(
    loader: Loader, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    rule()
    known = loader.current()
    rule("other")
    with without_table(PlanPrice):
        with pytest.raises(
            RulesUnavailable, match=r"(?s)ratelimits_billing_planprice.* was `manage\.py migrate` run\?"
        ):
            loader.reload()
        clock.seconds += conf.RELOAD_INTERVAL + 1
        assert loader.current() is known
        loader._thread.submit(int).result()  # after the refresh that was started
        assert "The rules could not be read again; the current ones stay in force" in caplog.text
    assert {row.name for row in loader.reload().rows.rules.values()} == {"burst", "other"}
