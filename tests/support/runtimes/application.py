"""The WSGI and the ASGI application of tests/runtimes.

The module decides a request when it is imported. So a server that loads it before it forks has a connection to Redis
and rules in memory, which its children must not share.
"""

from __future__ import annotations

import django

django.setup()

from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402

from ratelimits.identity import Identity  # noqa: E402
from ratelimits.quota import checking  # noqa: E402

assert checking.check(Identity("user:loading", account="account:loading"), "loading").allowed
wsgi, asgi = get_wsgi_application(), get_asgi_application()
