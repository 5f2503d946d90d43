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


class TlsServer:
    """Redis 7 with a port for TLS, and its usual port."""

    def __init__(self, folder: Path, options: Mapping[str, str] | None = None) -> None:
        subprocess.run(["sh", "-c", CERTIFICATE], cwd=folder, check=True, capture_output=True)
        self.port = free_port()
        #: The options of connections that trust the server.
        self.pool_kwargs: dict[str, Any] = {"ssl_ca_certs": str(folder / "cert.pem")}
        self.server = EmbeddedServer(
            folder / "server",
            aof=True,
            binary=server_binary("redis7"),
            options={
                "appendfsync": "always",
                "tls-port": str(self.port),
                "tls-cert-file": str(folder / "cert.pem"),
                "tls-key-file": str(folder / "key.pem"),
                "tls-ca-cert-file": str(folder / "cert.pem"),
                "tls-auth-clients": "no",
                **(options or {}),
            },
        )

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    def __enter__(self) -> TlsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
