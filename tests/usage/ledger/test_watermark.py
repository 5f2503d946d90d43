from __future__ import annotations

import io

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import override_settings

from ratelimits.conf import conf
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import ShardState
from tests.support.usage.traffic import flow, use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

COMMANDS = {"ratelimits_verify": {}, "ratelimits_report": {"period": "2026-11"}}


def said(command: str) -> str:
    err = io.StringIO()
    call_command(command, stdout=io.StringIO(), stderr=err, **COMMANDS[command])
    return err.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_whoever_reads_a_report_is_told_what_is_not_in_the_ledger_yet(command: str) -> None:
    use()
    text = said(command)
    assert "No usage was drained to the ledger yet" in text
    assert "0 sealed batches and 1 open batch wait in Redis" in text
    seal()
    assert "1 sealed batch and 0 open batches wait in Redis" in said(command)
    flow()
    text = said(command)
    assert "Usage is complete until 20" in text
    assert "0 sealed batches and 0 open batches wait in Redis" in text


def test_a_shard_that_was_never_drained_is_counted() -> None:
    use()
    flow()
    ShardState.objects.filter(shard=3).update(watermark=0)
    text = said("ratelimits_report")
    assert (
        f"Usage is not complete yet, since nothing was drained yet from 1 of {conf.SHARDS} shards; 0 sealed batches"
        in text
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_away_is_said(command: str) -> None:
    away = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    with override_settings(CACHES={**settings.CACHES, "ratelimits": away}):
        assert "Redis does not answer" in said(command)
