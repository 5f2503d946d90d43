"""Test a process whose threads are greenlets of gevent: each gets its own reply, and connections stay few."""

from __future__ import annotations

import json
import subprocess
import sys

from ratelimits.engine.transport.idle import IDLE_CONNECTIONS
from tests.support.rows import rule

AT_ONCE = """
from gevent import monkey
monkey.patch_all()
import json, django, gevent
from collections import Counter
django.setup()
from ratelimits.quota import checking as quota
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity

def check(number):
    answer = quota.check(Identity(f"user:{number}"))
    return "unavailable" if answer.decision is None else f"{answer.allowed}, {answer.decision.remaining} left"

def together(count):
    return Counter(one.value for one in gevent.joinall([gevent.spawn(check, number) for number in range(count)]))

first, used_up = together(400), together(400)
client = current_server().wire.client
connections, before = len(client.client_list()), client.info("stats")["total_connections_received"]
for number in range(200):
    gevent.spawn(check, number).join()
received = client.info("stats")["total_connections_received"] - before
print(json.dumps([first, used_up, connections, received]))
"""


def test_greenlets_at_once_get_their_own_replies_over_few_connections(environment: dict[str, str]) -> None:
    rule("all", "fixed_window", capacity=100, period=700_000_000, key_kind="global")
    rule("own", "fixed_window", capacity=1_000, period=700_000_000, key_kind="user")
    ran = subprocess.run([sys.executable, "-c", AT_ONCE], env=environment, capture_output=True, text=True, check=True)
    first, used_up, connections, received = json.loads(ran.stdout)
    # Each `remaining` from 99 down to 0 was in exactly one answer of those that passed.
    passed = {f"True, {left} left": 1 for left in range(100)}
    assert first == passed | {"False, 0 left": 300}, ran.stderr
    assert used_up == {"False, 0 left": 400}, ran.stderr
    assert connections <= IDLE_CONNECTIONS + 10
    assert received == 0, "greenlets one after the other take a connection that is there"
