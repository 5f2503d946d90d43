from __future__ import annotations

import io
import time

import pytest
from django.core.management import CommandError, call_command

from ratelimits.usage.ledger import crash, span_totals
from ratelimits.usage.ledger import drain as draining
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import KeyTotal, Line, PeriodUsage, RuleTotal, ShardState
from ratelimits.usage.models.totals import DAY, FIVE_DAYS, HOUR, QUARTER, SIX_HOURS
from tests.support.usage.span_totals import check_span_totals
from tests.support.usage.traffic import flow, use

pytestmark = pytest.mark.django_db(transaction=True)

NOW = int(time.time())
TIMES = NOW - 2 * DAY, NOW - 2 * HOUR, NOW - QUARTER, NOW


def use_some() -> None:
    """Make usage of two days under several rules, keys and meters, of which some is refused."""
    for at in TIMES:
        for account, key in (("acme", "api_key:1"), ("acme", "api_key:2"), ("other", "user:3"), ("", "ip:203.0.113.9")):
            for _ in range(3):
                use(account, key, now=at * 1_000_000, capacity=2, rule=5)
        use("acme", cost=250, meter="tokens", rule=6, now=at * 1_000_000)


def test_totals_are_the_sums_of_the_lines_of_their_spans() -> None:
    use_some()
    flow()
    check_span_totals()
    assert RuleTotal.objects.filter(span=QUARTER, rule=5, admitted_requests__gt=0, denied_requests__gt=0).exists()
    days = {at // DAY for at in TIMES}
    assert KeyTotal.objects.filter(span=DAY, account="acme", key="api_key:2").count() == len(days)
    quarters = KeyTotal.objects.filter(span=QUARTER)
    assert {(one.rule, one.admitted_requests) for one in quarters} == {(5, 0)}
    flow()
    use_some()
    flow()
    check_span_totals()


def test_what_is_tallied_later_is_added_to_its_span() -> None:
    use(now=None)
    flow()
    use(now=None)
    use(now=None)
    flow()
    check_span_totals()
    assert sum(KeyTotal.objects.filter(span=HOUR).values_list("admitted_requests", flat=True)) == 3


class Died(Exception):
    pass


@pytest.mark.parametrize("point", ["tally:locked", "tally:periods-added", "tally:added", "tally:committed"])
def test_a_tally_that_dies_at_any_step_adds_each_line_once(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(reached: str) -> None:
        if reached == point:
            raise Died

    use_some()
    seal()
    drain()
    with monkeypatch.context() as patch:
        patch.setattr(crash, "reached", die)
        with pytest.raises(Died):
            tally()
    tally()
    check_span_totals()
    assert Line.objects.exists()


def test_joining_batches_leaves_the_totals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimits.usage.ledger.retention.compact.SPAN", 1)
    use_some()
    flow()
    before = list(KeyTotal.objects.order_by("pk").values())
    list(compact())
    assert list(KeyTotal.objects.order_by("pk").values()) == before
    check_span_totals()


def test_totals_of_spans_that_are_no_longer_shown_are_deleted_and_not_made_again() -> None:
    use(now=None)
    use(now=(NOW - 40 * DAY) * 1_000_000)
    flow()
    assert set(KeyTotal.objects.values_list("span", flat=True)) == {HOUR, SIX_HOURS, DAY, FIVE_DAYS}
    assert (KeyTotal.objects.count(), RuleTotal.objects.count()) == (4, 2)
    later = NOW + 2 * DAY
    assert span_totals.expire("default", later) == 3
    assert set(KeyTotal.objects.values_list("span", flat=True)) == {DAY, FIVE_DAYS}
    assert span_totals.expire("default", NOW + 40 * DAY) == 3
    assert not KeyTotal.objects.exists()
    assert not RuleTotal.objects.exists()


def test_the_command_that_compacts_deletes_these_totals_too() -> None:
    use(now=None)
    flow()
    KeyTotal.objects.update(start=NOW - 400 * DAY)
    RuleTotal.objects.update(start=NOW - 400 * DAY)
    call_command("ratelimits_compact", stdout=io.StringIO())
    assert not KeyTotal.objects.exists()
    assert not RuleTotal.objects.exists()


def test_totals_are_made_again_from_the_lines_that_were_tallied() -> None:
    use_some()
    flow()
    KeyTotal.objects.filter(key="api_key:1").delete()
    RuleTotal.objects.update(admitted_requests=7)
    use(now=None)
    seal()
    drain()
    (waiting,) = ShardState.objects.exclude(tallied=0).filter(tallied__lt=2, position=2)
    span_totals.rebuild("default", int(time.time()))
    with pytest.raises(AssertionError):
        check_span_totals()  # the newest batch waits for its tally, which adds it
    assert waiting.tallied == 1
    tally()
    check_span_totals()


def test_a_drain_by_the_command_is_in_the_totals() -> None:
    use_some()
    seal()
    call_command("ratelimits_drain", stdout=io.StringIO())
    assert KeyTotal.objects.exists()
    assert PeriodUsage.objects.exists()
    check_span_totals()


def test_a_command_that_fails_adds_what_is_drained_to_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    use_some()
    seal()
    drain()

    def fail(**_options: object) -> None:
        raise NotFencedError("the server has no append-only file")

    monkeypatch.setattr(draining, "drain", fail)
    with pytest.raises(CommandError, match="no append-only file"):
        call_command("ratelimits_drain", stdout=io.StringIO())
    check_span_totals()


def test_a_command_makes_the_totals_again() -> None:
    use_some()
    flow()
    KeyTotal.objects.all().delete()
    use(now=None)
    seal()
    out = io.StringIO()
    call_command("ratelimits_drain", "--rebuild-totals", stdout=out)
    assert "Drained 1 batch, " in out.getvalue()
    assert "computed again" in out.getvalue()
    check_span_totals()
