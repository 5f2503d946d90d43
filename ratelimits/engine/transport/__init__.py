"""Send commands to a Redis server and read the replies: connections, pools, event loops and the circuit breaker."""

from __future__ import annotations
