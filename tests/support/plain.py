"""The settings of a test that wants the app's defaults."""

from __future__ import annotations

from typing import Any

from django.conf import settings

#: What names the session's server and its namespace. A drain looks at every shard, so there are as few as for others.
PLAIN: dict[str, Any] = {
    "CACHE_ALIAS": "ratelimits",
    "NAMESPACE": "test",
    "SHARDS": settings.RATELIMITS["SHARDS"],
}
