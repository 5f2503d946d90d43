"""A small project in one process that keeps its promises under one runtime: threads, gevent, an event loop, or a fork.

    python -m tests.support.runtimes.promises RUNTIME FOLDER

The process has its own server and database in FOLDER. It prints, as JSON, what is wrong with each promise; "" if it is
kept. In the runtime "fork", the parent has already limited requests when it forks: the child keeps the promises, and
the parent goes on.
"""

from __future__ import annotations

import sys

from tests.support.own_apps import OWN

if __name__ == "__main__" and sys.argv[1] == "gevent":
    from gevent import monkey  # type: ignore[import-untyped]

    monkey.patch_all()

import asyncio
import json
import os
import socket
import stat
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
from django.conf import settings

from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import breaker
from tests.support.eventually import until

RUNTIMES = ("threads", "gevent", "asgi", "fork")
#: Requests that come at once, and the limit that they share.
ASKED, LIMIT = 8, 3


class Client:
    """Sends requests as the runtime does: `at_once` from as many threads, greenlets or tasks."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime

    def get(self, path: str) -> Any:
        return self.at_once([path])[0]

    def at_once(self, paths: Sequence[str]) -> list[Any]:
        """Return the responses. Their streams are read to the end."""
        if self._runtime == "asgi":
            return asyncio.run(_in_tasks(paths))
        if self._runtime == "gevent":
            from gevent.pool import Pool  # type: ignore[import-untyped]

            return list(Pool(ASKED).map(_asked, paths))
        with ThreadPoolExecutor(ASKED) as pool:
            return list(pool.map(_asked, paths))

    def counts(self, path: str) -> dict[int, int]:
        """Send ASKED requests at once, and return how many answers have each status. A refusal may not be cached."""
        responses = self.at_once([path] * ASKED)
        for response in responses:
            if response.status_code == 429:
                assert "no-store" in response["Cache-Control"], dict(response.headers)
        return dict(Counter(response.status_code for response in responses))


def _asked(path: str) -> Any:
    from django.db import connections
    from django.test import Client as TestClient

    try:
        response: Any = TestClient(raise_request_exception=False).get(path)
        if response.streaming:
            b"".join(response.streaming_content)
        return response
    finally:
        connections.close_all()


async def _in_tasks(paths: Sequence[str]) -> list[Any]:
    from django.test import AsyncClient

    async def ask(path: str) -> Any:
        response: Any = await AsyncClient(raise_request_exception=False).get(path)
        if response.streaming:
            [part async for part in response.streaming_content]
        return response

    return list(await asyncio.gather(*map(ask, paths)))


class Controls:
    """Starts and ends the server. In a fork, the parent does so: only a parent can wait for its child."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._lines: Any = None

    def fork(self) -> bool:
        """Fork, and return whether this is the child. The parent obeys the child until the child ends."""
        own, theirs = socket.socketpair()
        child = os.fork()
        if not child:
            own.close()
            self._lines = theirs.makefile("rw")
            return True
        theirs.close()
        with own, own.makefile("rw") as lines:
            for line in lines:
                getattr(self._server, line.strip())()
                print("done", file=lines, flush=True)
        assert os.waitpid(child, 0)[1] == 0
        return False

    def order(self, what: str) -> None:
        if self._lines is None:
            getattr(self._server, what)()
        else:
            print(what, file=self._lines, flush=True)
            assert self._lines.readline() == "done\n"


def _configure(folder: Path, server: EmbeddedServer, *, async_views: bool) -> None:
    settings.configure(
        DEBUG=False,
        ALLOWED_HOSTS=["testserver"],
        SECRET_KEY="a test's",
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        ROOT_URLCONF="tests.support.runtimes.promised_views",
        ASYNC_VIEWS=async_views,
        # A project may have it in production: it says nothing about tests.
        EMAIL_BACKEND="django.core.mail.backends.locmem.EmailBackend",
        INSTALLED_APPS=[
            *(
                "django.contrib.auth",
                "django.contrib.contenttypes",
                "rest_framework",
                "simple_history",
                *OWN,
            )
        ],
        MIDDLEWARE=["ratelimits.middleware.QuotaMiddleware"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "site.sqlite3")}},
        CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url}},
        RATELIMITS={
            "NAMESPACE": "promises",
            "SHARDS": 4,
            "NUM_PROXIES": 0,
            "TIMEOUT": 60,
            "FENCE": "none",
            "PATHS": {"/path/": {"scope": "path"}},
            "PROCESS_TOTALS_INTERVAL": 0.05,
        },
        REST_FRAMEWORK={
            "DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.QuotaThrottle"],
            "DEFAULT_AUTHENTICATION_CLASSES": [],
            "UNAUTHENTICATED_USER": None,
            "DEFAULT_THROTTLE_RATES": {"scoped": f"{LIMIT}/hour"},
        },
    )


EXACT = {200: LIMIT, 429: ASKED - LIMIT}
Promise = Callable[[Client, Controls, EmbeddedServer], None]


def _window(name: str, **fields: Any) -> None:
    from tests.support.rows import rule

    rule(name, "fixed_window", **{"scope": name, "key_kind": "ip", "capacity": LIMIT, "period": 3600, **fields})


def dated_overrides_without_time_zones(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from django.test import override_settings

    from ratelimits import moments
    from ratelimits.models import KeyOverride

    with override_settings(USE_TZ=False, TIME_ZONE="America/Los_Angeles"):
        _window("dated", capacity=1)
        until_later = moments.now() + timedelta(hours=1)
        KeyOverride.objects.create(key="ip:127.0.0.1", rule="dated", capacity=LIMIT, valid_until=until_later)
        assert client.counts("/dated/") == EXACT


def paths_below_a_script_name(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from django.test import override_settings

    _window("path")
    with override_settings(FORCE_SCRIPT_NAME="/app"):
        assert client.counts("/path/") == EXACT


def leases_end_with_errors_and_streams(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from tests.support.rows import rule

    rule("one", "concurrency", scope="leased", key_kind="ip", capacity=1, lease_ttl=3600)
    _window("errors", scope="leased", capacity=2)
    for path, status in (("/error/", 500), ("/api-error/", 500), ("/stream/", 200)):
        assert [client.get(path).status_code for _ in range(2)] == [status] * 2, path
    assert client.get("/stream/").status_code == 429, "the streams are charged, and the errors are not"


def many_rules_limit(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from ratelimits.models import Rule
    from tests.support.rows import unsaved

    _window("many")
    shadow: dict[str, Any] = {"scope": "many", "key_kind": "ip", "mode": "shadow"}
    Rule.objects.bulk_create([unsaved(f"many-{number}", "fixed_window", **shadow) for number in range(125)])
    assert client.counts("/many/") == EXACT


def process_totals_are_written(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from ratelimits.usage.counting import process_totals
    from ratelimits.usage.models import ProcessTotal

    assert client.get("/plain/").status_code == 200
    own = ProcessTotal.objects.filter(process=process_totals.process(), kind="admitted")
    until(own.exists, "the thread of this process writes")


def the_first_requests_after_an_outage_are_decided(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from ratelimits.usage.counting import process_totals
    from ratelimits.usage.models import ProcessTotal

    _window("back", capacity=10)
    assert client.get("/back/").status_code == 200
    controls.order("kill")
    while not breaker.is_open:
        assert client.get("/back/").status_code == 200
    own = ProcessTotal.objects.filter(process=process_totals.process(), kind="unmetered")
    until(own.exists, "the unmetered requests are declared")
    controls.order("start")
    until(lambda: not breaker.is_open, "the process notices")
    _window("afterwards", scope="back")
    assert client.counts("/back/") == EXACT


def drop_in_throttles_are_exact(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    assert client.counts("/scoped/") == EXACT
    assert client.counts("/timed/") == EXACT


def costs_that_clients_choose_have_bounds(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    found = client.at_once([f"/costs/?tokens={cost}" for cost in ("2", "lots", "-5", "", str(2**41))])
    assert [response.status_code for response in found] == [200, 400, 400, 400, 400]


def the_embedded_server_is_private(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    modes = {stat.S_IMODE(file.stat().st_mode) for file in server.directory.rglob("*") if file.is_file()}
    assert (stat.S_IMODE(server.directory.stat().st_mode), modes) == (0o700, {0o600})


def a_clean_restart_is_one_gap(client: Client, controls: Controls, server: EmbeddedServer) -> None:
    from ratelimits.usage.ledger.drain import drain
    from ratelimits.usage.ledger.seal import seal
    from ratelimits.usage.models import DurabilityGap

    def flow() -> None:
        assert client.get("/plain/").status_code == 200
        seal()
        drain()

    flow()  # after the outage of another promise
    before = set(DurabilityGap.objects.values_list("pk", flat=True))
    controls.order("stop")
    controls.order("start")
    flow()
    flow()
    gaps = DurabilityGap.objects.exclude(pk__in=before)
    assert [gap.kind for gap in gaps] == ["restart"], [str(gap) for gap in gaps]


#: Each is named by what a project can rely on.
PROMISES: dict[str, Promise] = {
    "dated rows with USE_TZ=False apply": dated_overrides_without_time_zones,
    "PATHS apply below a script name": paths_below_a_script_name,
    "errors and streams keep no lease": leases_end_with_errors_and_streams,
    "more than 120 rules still limit": many_rules_limit,
    "a mail backend in memory is no test run": process_totals_are_written,
    "the first requests after an outage are decided": the_first_requests_after_an_outage_are_decided,
    "drop-in throttles are exact, subclasses too": drop_in_throttles_are_exact,
    "a wrong cost of a client is a 400": costs_that_clients_choose_have_bounds,
    "the embedded server is private": the_embedded_server_is_private,
    "a clean restart is one gap": a_clean_restart_is_one_gap,
}


def _broken(client: Client, controls: Controls, server: EmbeddedServer) -> Iterator[tuple[str, str]]:
    for name, promise in PROMISES.items():
        try:
            promise(client, controls, server)
        except Exception:  # noqa: BLE001  (the test shows whatever it is)
            yield name, traceback.format_exc()
        else:
            yield name, ""


def main(runtime: str, folder: Path) -> None:
    server = EmbeddedServer(folder / "redis", aof=True)
    _configure(folder, server, async_views=runtime == "asgi")
    django.setup()
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", verbosity=0)
    client, controls, result = Client(runtime), Controls(server), folder / "result.json"
    try:
        if runtime == "fork":
            _window("plain", capacity=1_000)
            assert client.get("/plain/").status_code == 200
            connections.close_all()
            if not controls.fork():
                broken = json.loads(result.read_text())
                after = client.get("/plain/").status_code
                print(json.dumps({**broken, "the parent goes on": "" if after == 200 else f"status {after}"}))
                return
        broken = dict(_broken(client, controls, server))
        if runtime == "fork":
            result.write_text(json.dumps(broken))
            os._exit(0)
        print(json.dumps(broken))
    finally:
        server.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
