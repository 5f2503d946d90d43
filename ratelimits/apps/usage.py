"""Installs the floor that counts usage: from now on, Redis counts requests, and this process too."""

from __future__ import annotations

from ratelimits import recording, rules, telemetry
from ratelimits.checks import usage  # noqa: F401  (the system checks)
from ratelimits.doctor import usage as usage_for_doctor
from ratelimits.quota.counting import counting
from ratelimits.quota.usage import access, from_ledger, process_totals
from ratelimits.status import additions, counted, readings
from ratelimits.usage import process_totals as stored_totals


def install() -> None:
    """Put the functions of this floor in the places that the floors below leave for them."""
    counting.counts = True
    counting.admitted = process_totals.admitted
    counting.add = process_totals.add
    counting.by_row = access.count
    counting.refusals = access.take
    counting.restore = from_ledger.restore
    counting.arestore = from_ledger.arestore
    counting.record = recording.record
    counting.forget = access.clear
    process_totals.write_with(stored_totals.write)
    telemetry.sources[:] = [readings.read]
    additions.register(counted.ADDITIONS)
    usage_for_doctor.install()
    # An app that was ready earlier can have asked for a decision. Its prepared commands count and restore nothing.
    rules.forget()
