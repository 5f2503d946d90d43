"""Draw random projects and requests, and compare whom limits count and who pays with a model of twenty lines.

`pytest tests/identity/test_projects.py --long -s` draws 2,000 projects; without `--long` it draws a sample of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import redis
from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model
from django.http import HttpRequest
from django.test import override_settings

from ratelimits.identity import Identity, aidentify, identify
from ratelimits.quota import checking
from tests.identity.conftest import Device, Team, request, token_user
from tests.support.cluster import Cluster
from tests.support.entry_points import begin_afresh, counted
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary

pytestmark = pytest.mark.django_db(transaction=True)

PROJECTS, SAMPLE = 2_000, 250
REQUESTS = 16
#: The capacity of the rule for each kind of key. The capacities differ, so that each rule refuses in some project.
CAPACITIES = {"user": 3, "api_key": 3, "caller": 2, "account": 4}
UUIDS = [UUID(int=number) for number in (1, 2)]
TEXTS = ["1", "2", "ada", "user:1", "api_key:1", "tests.team:1", "~" + "0" * 32, "=1", "x" * 300, "x" * 301, "a\0"]
ROWS = [Team(pk=1), Team(pk=2), Device(pk=1), Device(pk=2), User(pk=1), User(pk=2)]
NAMES: list[Any] = [*ROWS, *TEXTS, *UUIDS, 1, 2, None, "", b"ada"]
USERS: list[Any] = [*NAMES, token_user(1), AnonymousUser(), {"id": 1}, True]
AUTHS: list[Any] = [*NAMES, {"sub": 1}, True, object()]
#: What a hook returns: something of NAMES, or in a few projects something that is no name.
WRONG: list[Any] = [True, {"sub": 1}, object(), 1.5, ["a"]]


class Project(NamedTuple):
    """A project: its hooks, each with whether it is async, and its number of shards."""

    hooks: dict[str, bool]
    shards: int
    asks_async: bool


class Asked(NamedTuple):
    """A request: its user and credential, and what each hook answers about it."""

    request: HttpRequest
    answers: dict[str, Any]


# The model. A name is a tuple; two names are one if the tuples are equal.


class Unreadable(Exception):
    """The model cannot read a value."""


def model_name(value: Any, own: type[Model] | None = None, secret: bool = False) -> Any:
    if value is None or value in ("", b""):
        return None
    if isinstance(value, Model):
        is_own = own is not None and isinstance(value, own)
        return ("plain", str(value.pk)) if is_own else ("row", type(value).__name__, str(value.pk))
    if isinstance(value, bool) or not isinstance(value, str | bytes | int | UUID):
        raise Unreadable
    text = value.decode() if isinstance(value, bytes) else str(value)
    return ("secret", text) if secret and isinstance(value, str | bytes) else ("plain", text)


def model_user(value: Any) -> Any:
    if isinstance(value, AnonymousUser):
        return None
    return model_name(getattr(value, "pk", value) if type(value).__name__ == "SimpleNamespace" else value, User)


def model_key(value: Any) -> Any:
    return model_name(value, secret=True)


def model(project: Project, asked: Asked) -> dict[str, Any]:
    """Return the name of each kind, None if the request has none, Unreadable if it cannot be read."""
    found: dict[str, Any] = {}
    for kind, read, own in (("user", model_user, "user"), ("api_key", model_key, "auth")):
        answer = asked.answers.get(kind.upper())
        value = read(answer)  # a hook's wrong answer is an error
        try:
            found[kind] = read(getattr(asked.request, own)) if answer is None else value
        except Unreadable:
            found[kind] = Unreadable
    user, key, account = found["user"], found["api_key"], asked.answers.get("ACCOUNT")
    named = ("user", model_user(account)) if isinstance(account, User) else model_name(account)
    payer = ("user", user) if "ACCOUNT" in project.hooks else user
    default = (
        Unreadable
        if user is Unreadable
        else payer
        if user
        else Unreadable
        if key is Unreadable
        else key and ("key", key)
    )
    found["account"] = named or default
    found["caller"] = user and (user if user is Unreadable else ("user", user))
    found["caller"] = found["caller"] or (key and (key if key is Unreadable else ("key", key))) or ("address",)
    return found


# The comparison


def draw_project(draw: Random) -> Project:
    hooks = {name: draw.random() < 0.4 for name in ("USER", "API_KEY", "ACCOUNT") if draw.random() < 0.4}
    return Project(hooks, draw.choice([1, 4, 64]), draw.random() < 0.3)


def draw_request(draw: Random, project: Project, wrong: bool) -> Asked:
    few = draw.sample(NAMES, 3)
    answers = {name: draw.choice(few if draw.random() < 0.8 else NAMES) for name in project.hooks}
    if wrong and answers:
        answers[draw.choice(list(answers))] = draw.choice(WRONG)
    made: Any = request(draw.choice(USERS), draw.choice(AUTHS))
    made.answers = answers
    return Asked(made, answers)


def hook(name: str, is_async: bool) -> Callable[[Any], Any]:
    async def awaited(request: Any) -> Any:
        await asyncio.sleep(0)
        return request.answers[name]

    return awaited if is_async else lambda request: request.answers[name]


def settings_of(project: Project) -> dict[str, Any]:
    hooks = {name: hook(name, is_async) for name, is_async in project.hooks.items()}
    return {**settings.RATELIMITS, "ACCOUNT": None, "SHARDS": project.shards, "DENY_CACHE_SECONDS": 0, **hooks}


def identity_of(project: Project, asked: Asked) -> Identity:
    return asyncio.run(aidentify(asked.request)) if project.asks_async else identify(asked.request)


def compare(draw: Random, client: redis.Redis | None) -> Iterator[str]:
    """Draw a project and its requests; yield each difference between the app and the model."""
    project = draw_project(draw)
    names: dict[tuple[str, Any], str] = {}
    charged: Counter[tuple[str, Any]] = Counter()
    lines: Counter[tuple[Any, Any]] = Counter()
    with override_settings(RATELIMITS=settings_of(project)):
        pool = [draw_request(draw, project, wrong=draw.random() < 0.1) for _ in range(5)]
        for _ in range(REQUESTS):
            asked = draw.choice(pool)
            try:
                truth = model(project, asked)
            except Unreadable:
                with pytest.raises(ImproperlyConfigured):
                    identity_of(project, asked)
                continue
            who = identity_of(project, asked)
            for kind in ("user", "api_key", "account"):
                value, name = truth[kind], getattr(who, kind)
                if (value is Unreadable) != (kind in who.unreadable) or (name is None) != (value in (None, Unreadable)):
                    yield f"{project}: {kind} of {asked} is {name!r}, not {value}"
                elif name is not None and names.setdefault((kind, value), name) != name:
                    yield f"{project}: {value} has two names, {names[kind, value]!r} and {name!r}"
            counts = {kind: truth[kind] for kind in CAPACITIES if truth[kind] is not None}
            # A rule that needs what cannot be read refuses: its failure policy is "deny".
            readable = Unreadable not in counts.values()
            expected = readable and all(charged[kind, value] < CAPACITIES[kind] for kind, value in counts.items())
            if checking.check(who).allowed != expected:
                yield f"{project}: {asked} is {'refused' if expected else 'admitted'}, with {truth} after {charged}"
                return
            if expected:
                charged.update(counts.items())
                kind = "api_key" if truth["api_key"] else "user"
                lines[(kind, truth[kind]), truth["account"]] += 1
    yield from (
        f"{project}: {name} is the name of {uses} {kind}s"
        for (kind, name), uses in Counter((kind, name) for (kind, _value), name in names.items()).items()
        if uses > 1
    )
    if client is not None:
        found = Counter({field: units for field, units in counted(client).items() if field.startswith("a ")})
        if sorted(found.values()) != sorted(lines.values()):
            yield f"{project}: the ledger has {found}, not {lines}"


@pytest.fixture(scope="module")
def nodes(servers: TestServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"), server_binary(servers.redis_kind))
    yield running
    running.stop()


@pytest.mark.parametrize("place", ["server", "cluster"])
def test_no_two_callers_share_a_count_and_none_has_two(
    place: str,
    redis_client: redis.Redis,
    long_run: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    cluster: Cluster | None = request.getfixturevalue("nodes") if place == "cluster" else None
    differences: list[str] = []
    with cluster.settings() if cluster is not None else nullcontext():
        begin_afresh(monkeypatch)
        for kind, capacity in CAPACITIES.items():
            rule(
                kind.replace("_", "-"),
                "fixed_window",
                key_kind=kind,
                capacity=capacity,
                period=86_400,
                window_start="first_hit",
                on_failure="deny",
            )
        for seed in range((PROJECTS if long_run else SAMPLE) // (4 if cluster is not None else 1)):
            if cluster is not None:
                cluster.empty()
            else:
                redis_client.flushall()
            draw = Random(f"{place} {seed}")
            differences += compare(draw, redis_client if cluster is None else None)
            assert len(differences) < 5, "\n".join(differences)
    assert differences == [], "\n".join(differences)
