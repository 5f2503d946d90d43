"""Test the whole path over real HTTP: gunicorn, Redis, a Celery worker with beat, the ledger."""

from __future__ import annotations

import subprocess

from project.demo import compare, seed
from project.demo.traffic import Client, ClientCounts, Traffic
from ratelimits.usage.models import Line


def send(port: int, keys: list[seed.IssuedKey]) -> dict[str, ClientCounts]:
    return Traffic(port, [Client(key.key, key.secret) for key in keys], requests=400).run(lambda: None)


def test_what_the_clients_counted_is_what_the_ledger_says_and_a_lost_line_is_noticed(
    web_server: int, worker: subprocess.Popen[bytes]
) -> None:
    seed.seed_rules()
    keys = seed.seed_keys()
    counts = send(web_server, keys)
    compare.wait_for_ledger(keys, seconds=60)

    rows = compare.compare(keys, counts)
    assert [row.difference for row in rows] == [0] * len(keys)
    assert sum(row.admitted for row in rows) > 0
    assert sum(row.denied for row in rows) > 0
    assert sum(row.tokens for row in rows) > 0

    lost = Line.objects.filter(key=keys[0].key).order_by("-admitted_units").first()
    assert lost is not None
    Line.objects.filter(pk=lost.pk).delete()
    differences = [row.difference for row in compare.compare(keys, counts)]
    assert differences == [lost.admitted_units + lost.denied_requests, 0, 0, 0, 0]
