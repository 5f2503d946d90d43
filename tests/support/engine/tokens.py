"""A provider of tokens that soon expire, made of the parts of redis-py, as the package redis-entraid makes its own."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.auth.idp import IdentityProviderInterface
from redis.auth.token import SimpleToken, TokenInterface
from redis.auth.token_manager import CredentialsListener, RetryPolicy, TokenManager, TokenManagerConfig
from redis.credentials import StreamingCredentialProvider

#: Milliseconds until a token expires. The manager gets the next one after half of this time.
TTL = 200


class _Identity(IdentityProviderInterface):
    """Makes a user of the server for each token."""

    def __init__(self, port: int) -> None:
        self._admin = redis.Redis(port=port)
        self.issued: list[str] = []

    def request_token(self, force_refresh: bool = False) -> TokenInterface:
        if force_refresh or not self.issued:
            name = f"app-{len(self.issued)}"
            self._admin.execute_command("ACL", "SETUSER", name, "on", ">secret", "allkeys", "+@all")
            self.issued.append(name)
        now = 1000 * time.time()
        return SimpleToken("secret", now + TTL, now, {"oid": self.issued[-1]})

    def stop(self) -> None:
        self._admin.execute_command("ACL", "DELUSER", *self.issued)
        self._admin.close()


class Tokens(StreamingCredentialProvider):
    def __init__(self, port: int) -> None:
        self._identity = _Identity(port)
        self._manager = TokenManager(self._identity, TokenManagerConfig(0.5, 0, 1000, RetryPolicy(3, 10)))
        self._listener = CredentialsListener()
        self._streams = False

    @property
    def issued(self) -> list[str]:
        return self._identity.issued

    def get_credentials(self) -> tuple[str, str]:
        token = self._manager.acquire_token().get_token()
        if not self._streams:
            self._manager.start(self._listener)
            self._streams = True
        return token.try_get("oid"), token.get_value()

    async def get_credentials_async(self) -> tuple[str, str]:
        token = (await self._manager.acquire_token_async()).get_token()
        if not self._streams:
            self._streams = True
            await self._manager.start_async(self._listener, block_for_initial=True)
        return token.try_get("oid"), token.get_value()

    def on_next(self, callback: Any) -> None:
        self._listener.on_next = callback

    def on_error(self, callback: Any) -> None:
        self._listener.on_error = callback

    def is_streaming(self) -> bool:
        return self._streams

    def stop(self) -> None:
        self._manager.stop()
        self._identity.stop()
