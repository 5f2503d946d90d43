"""The connection factory for a django-redis cache alias on a Redis Cluster.

Set its path as CONNECTION_FACTORY in the options of the alias.
"""

from __future__ import annotations

from typing import Any

from django_redis.pool import ConnectionFactory as PoolFactory
from redis.cluster import RedisCluster

#: Timeout in seconds for connecting to a node, and for each of its answers, if the alias has no timeouts.
TIMEOUT = 1.0


class ConnectionFactory(PoolFactory):  # type: ignore[misc]
    """A factory that makes clients of the cluster to which the node at LOCATION belongs.

    CONNECTION_POOL_KWARGS apply to the connections to each node.
    """

    def connect(self, url: str) -> RedisCluster:
        """Return a new client of the cluster."""
        parameters = {name: value for name, value in self.make_connection_params(url).items() if name != "url"}
        # The client of a cluster has its own parser.
        parameters.pop("parser_class", None)
        defaults: dict[str, Any] = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
        # If a slot has no node, the other slots can still be used.
        defaults["require_full_coverage"] = False
        kwargs = {**defaults, **parameters, **self.pool_cls_kwargs, **self.redis_client_cls_kwargs}
        client: RedisCluster = RedisCluster.from_url(url, **kwargs)
        # redis-py leaves out some options of connections that it does not know as options of a cluster.
        known: dict[str, Any] = client.nodes_manager.connection_kwargs
        for name, value in kwargs.items():
            if name.startswith(("ssl_", "health_check_interval")):
                known.setdefault(name, value)
        return client

    def disconnect(self, connection: RedisCluster) -> None:
        """Close the client's connections to all nodes."""
        connection.disconnect_connection_pools()  # type: ignore[no-untyped-call]
