"""The connection factory for a django-redis cache alias on a Redis Cluster.

Name it as the alias's CONNECTION_FACTORY.
"""

from __future__ import annotations

from typing import Any

from django_redis.pool import ConnectionFactory as PoolFactory
from redis.cluster import RedisCluster

#: Timeout in seconds for the nodes' first answers, unless the alias has its own.
TIMEOUT = 1.0


class ConnectionFactory(PoolFactory):  # type: ignore[misc]
    """Makes clients of the cluster to which the node at LOCATION belongs.

    CONNECTION_POOL_KWARGS apply to the connections to each node.
    """

    def connect(self, url: str) -> RedisCluster:
        """Return a new client of the cluster."""
        given = {name: value for name, value in self.make_connection_params(url).items() if name != "url"}
        # A cluster's client has its own parser.
        given.pop("parser_class", None)
        timeouts = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
        # If a slot has no node, the other slots can still be used.
        partly = {"require_full_coverage": False}
        kwargs: dict[str, Any] = {**timeouts, **partly, **given, **self.pool_cls_kwargs, **self.redis_client_cls_kwargs}
        return RedisCluster.from_url(url, **kwargs)

    def disconnect(self, connection: RedisCluster) -> None:
        """Close the client's connections to all nodes."""
        connection.disconnect_connection_pools()  # type: ignore[no-untyped-call]
