"""Run a primary, its replica and a sentinel that watches them, as real servers, for one test."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from django.test import override_settings
from redis.exceptions import ResponseError

from ratelimits.embedded import EmbeddedServer, die_with_parent, free_port
from tests.support.engine.tls import Certificate
from tests.support.eventually import until

NAME = "quota"


class Watched:
    """The three servers. If the primary does not answer for `down_after` ms, the sentinel promotes the replica.

    With a certificate, the servers, the sentinel and the app speak TLS with each other.
    """

    def __init__(
        self, directory: Path, binary: Path, down_after: int = 60_000, certificate: Certificate | None = None
    ) -> None:
        self._certificate = certificate
        self.servers: list[EmbeddedServer] = []
        #: The ports under which the sentinel names the servers: those of TLS, or the usual ones.
        self.ports: list[int] = []
        try:
            for name in ("primary", "replica"):
                self._start(directory / name, binary)
            with redis.Redis(port=self.servers[1].port) as client:
                client.replicaof("127.0.0.1", self.ports[0])
            self.port, plain = free_port(), free_port()
            tls = certificate.options(self.port) if certificate is not None else {}
            (directory / "sentinel.conf").write_text(
                f"port {plain if tls else self.port}\nbind 127.0.0.1\nlogfile sentinel.log\n"
                + "".join(f"{name} {value}\n" for name, value in tls.items())
                + f"sentinel monitor {NAME} 127.0.0.1 {self.ports[0]} 1\n"
                f"sentinel down-after-milliseconds {NAME} {down_after}\n"
                # Beside load, a failover can come to nothing. The sentinel gives it up after this number of ms.
                f"sentinel failover-timeout {NAME} 10000\n"
            )
            self.replicated()
            self.process = subprocess.Popen(
                [str(binary), "sentinel.conf", "--sentinel"],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except BaseException:
            self.stop()
            raise
        self.sentinel = redis.Redis(port=plain if tls else self.port, decode_responses=True)
        until(self.sentinel.ping, "the sentinel answers")
        # Ask the servers for their role more often than every ten seconds. Old versions do not have this setting.
        with suppress(ResponseError):
            self.sentinel.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", "100")
        until(self._knows_the_replica, "the sentinel knows the replica")

    def _start(self, directory: Path, binary: Path) -> None:
        options = {"appendfsync": "always", "repl-diskless-sync-delay": "0"}
        port = free_port()
        if self._certificate is not None:
            options |= self._certificate.options(port)
        self.servers.append(EmbeddedServer(directory, aof=True, binary=binary, options=options))
        self.ports.append(port if self._certificate is not None else self.servers[-1].port)

    def _knows_the_replica(self) -> bool:
        replicas = self.sentinel.sentinel_slaves(NAME)
        return any(one["flags"] == "slave" and one["master-link-status"] == "ok" for one in replicas)

    def primary(self) -> EmbeddedServer:
        """Return the primary that redis-py learns from the sentinel, a little later than GET-MASTER-ADDR-BY-NAME."""
        masters: Any = self.sentinel.sentinel_masters()
        return self.servers[self.ports.index(int(masters[NAME]["port"]))]

    def replicated(self) -> None:
        """Wait until the replica has all data of the primary."""

        def same() -> bool:
            infos = []
            for server in self.servers:
                with redis.Redis(port=server.port) as client:
                    infos.append(client.info("replication"))
            linked = [info.get("master_link_status") for info in infos if info["role"] == "slave"]
            offsets = {int(info["master_repl_offset"]) for info in infos}
            return linked == ["up"] and len(offsets) == 1

        until(same, "the replica has caught up")

    def failover(self, *, follows: bool = True) -> None:
        """Let the two servers swap roles. Without `follows`, the old primary learns this eight seconds later."""
        before = self.primary()

        def is_over() -> bool:
            if self.primary() is not before:
                return True
            masters: Any = self.sentinel.sentinel_masters()
            if "failover_in_progress" not in masters[NAME]["flags"]:
                self.sentinel.sentinel_failover(NAME)
            return False

        until(is_over, "the sentinel names the new primary")
        if follows:
            # Tell the old primary now; the sentinel would tell it later.
            with redis.Redis(port=before.port) as client:
                client.replicaof("127.0.0.1", self.ports[self.servers.index(self.primary())])
                client.client_kill_filter(_type="normal", skipme=True)

    def settings(self, **options: Any) -> Any:
        """Return the app's cache alias that goes through the sentinel."""
        if self._certificate is not None:
            trust = {"ssl": True, **self._certificate.pool_kwargs}
            options = {"CONNECTION_POOL_KWARGS": trust, "SENTINEL_KWARGS": trust, **options}
        return override_settings(
            CACHES={
                name: {
                    "BACKEND": "django_redis.cache.RedisCache",
                    "LOCATION": f"redis://{NAME}/{number}",
                    "OPTIONS": {
                        "CLIENT_CLASS": "django_redis.client.SentinelClient",
                        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                        "SENTINELS": [("127.0.0.1", self.port)],
                        **options,
                    },
                }
                for number, name in enumerate(("ratelimits", "default"))
            }
        )

    def stop(self) -> None:
        if hasattr(self, "sentinel"):
            self.sentinel.close()
        if hasattr(self, "process"):
            self.process.kill()
            self.process.wait()
        for server in self.servers:
            server.kill()
