"""Edit accounts' terms as if at chosen moments, and make requests under the terms of that moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ratelimits import engine
from ratelimits.models import Account, Customer, Name, Plan, PlanInclusion, versions
from ratelimits.models.customers import make_missing
from ratelimits.usage.customers.move import move
from tests.support.usage.traffic import at, use


@contextmanager
def edit_at(moment: str | int) -> Iterator[None]:
    """Let the block's edits have this moment as their time (µs since 1970 UTC, or a text)."""
    with versions.editing("default") as edit:
        token = versions._current_edit.set(replace(edit, since=at(moment) if isinstance(moment, str) else moment))
        try:
            yield
        finally:
            versions._current_edit.reset(token)


def change(moment: str, name: str = "acme", **fields: Any) -> None:
    """Give an account other terms."""
    with edit_at(moment):
        Account.objects.filter(identifier=name).update(**fields)


def rename(text: str, new: str, moment: str) -> Customer:
    """Give the customer of a text another text from a moment on, and the former text to a new customer."""
    make_missing("default", [text])
    customer, since = Name.objects.get(identifier=text, until=None).customer, at(moment) // 1_000_000
    move(new, customer, since)
    move(text, None, since)
    return customer


def plan(slug: str, requests: int) -> Plan:
    """Make a plan, in the past, that includes this number of requests."""
    with edit_at(0):
        made = Plan.objects.create(name=slug.title(), slug=slug)
        PlanInclusion.objects.create(plan=made, meter="requests", quantity=requests)
    return made


def spend(name: str, moment: str, cost: int = 1, key: str = "api_key:1") -> engine.Decision:
    """Make one request of an account."""
    return use(name, key, cost=cost, now=at(moment), configuration=versions.ConfigVersion.read("default")[0])
