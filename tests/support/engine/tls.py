"""A server that also speaks TLS. Of the servers of the tests, Debian's Redis 7 is built with TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratelimits.embedded import EmbeddedServer, free_port
from tests.support.servers import server_binary

#: Makes the certificate cert.pem of a server at 127.0.0.1, which signs itself, and its key key.pem.
CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    " -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
)


#: The bus of a cluster has the port that is 10,000 higher.
_HIGHEST_PORT = 55_535


class Certificate:
    """A new certificate of servers at 127.0.0.1, in a folder."""

    def __init__(self, folder: Path) -> None:
        subprocess.run(["sh", "-c", CERTIFICATE], cwd=folder, check=True, capture_output=True)
        self._folder = folder
        #: The options of connections that trust the servers.
        self.pool_kwargs: dict[str, Any] = {"ssl_ca_certs": str(folder / "cert.pem")}

    def options(self, port: int) -> dict[str, str]:
        """Return the settings of a server that speaks TLS at this port, also with other servers."""
        return {
            "tls-port": str(port),
            "tls-cert-file": str(self._folder / "cert.pem"),
            "tls-key-file": str(self._folder / "key.pem"),
            "tls-ca-cert-file": str(self._folder / "cert.pem"),
            "tls-auth-clients": "no",
            "tls-replication": "yes",
        }


class TlsServer:
    """Redis 7 with a port for TLS, and its usual port."""

    def __init__(self, folder: Path, options: Mapping[str, str] | None = None) -> None:
        certificate = Certificate(folder)
        while (port := free_port()) > _HIGHEST_PORT:
            pass
        self.port = port
        self.pool_kwargs = certificate.pool_kwargs
        self.server = EmbeddedServer(
            folder / "server",
            aof=True,
            binary=server_binary("redis7"),
            options={"appendfsync": "always", **certificate.options(self.port), **(options or {})},
        )

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    def __enter__(self) -> TlsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
