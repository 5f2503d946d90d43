"""What a django-redis cache alias names as its CONNECTION_FACTORY to lead to a Redis Cluster."""

from __future__ import annotations

from typing import Any

from django_redis.pool import ConnectionFactory as PoolFactory
from redis.cluster import RedisCluster

#: Seconds in which a node must answer as the nodes are asked for, unless the alias says otherwise.
TIMEOUT = 1.0


class ConnectionFactory(PoolFactory):  # type: ignore[misc]
    """Clients of the cluster that the node at LOCATION belongs to; CONNECTION_POOL_KWARGS are for each of its nodes."""

    def connect(self, url: str) -> RedisCluster:
        """A client of its own for each backend; its nodes keep their connections."""
        given = {name: value for name, value in self.make_connection_params(url).items() if name != "url"}
        # A cluster's client brings a parser of its own.
        given.pop("parser_class", None)
        timeouts = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
        # While a slot has no node, the others are decided.
        partly = {"require_full_coverage": False}
        kwargs: dict[str, Any] = {**timeouts, **partly, **given, **self.pool_cls_kwargs, **self.redis_client_cls_kwargs}
        return RedisCluster.from_url(url, **kwargs)

    def disconnect(self, connection: RedisCluster) -> None:
        """Close the connections of all its nodes."""
        connection.disconnect_connection_pools()  # type: ignore[no-untyped-call]
