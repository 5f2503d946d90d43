"""Send commands to a Redis server and read the replies. This package has the connections and the circuit breaker."""

from __future__ import annotations
