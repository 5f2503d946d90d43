"""Send the requests of tests as a web server does that serves the project below a path, the FORCE_SCRIPT_NAME.

Tests write paths as in the URLconf, or take them from pages and from `reverse`, where they begin with the script name.
"""

from __future__ import annotations

import os
from typing import Any

from django.test import AsyncRequestFactory, RequestFactory

#: The path below which the project of this test session is served; "" if it has the whole site.
SITE = os.environ.get("RATELIMITS_TEST_SCRIPT_NAME", "")
_base_environ, _base_scope = RequestFactory._base_environ, AsyncRequestFactory._base_scope  # type: ignore[attr-defined]


def serve_below_site() -> None:
    """Let each client of a test send its requests to paths below `SITE`."""

    def without(path: str) -> str:
        return path.removeprefix(SITE) if path.startswith(f"{SITE}/") else path

    def environ(factory: Any, **request: Any) -> Any:
        made = _base_environ(factory, **request)
        return made | {"PATH_INFO": without(made["PATH_INFO"])}

    def scope(factory: Any, **request: Any) -> Any:
        made = _base_scope(factory, **request)
        return made | {"path": SITE + without(made["path"])}

    RequestFactory._base_environ = environ  # type: ignore[attr-defined]
    AsyncRequestFactory._base_scope = scope  # type: ignore[attr-defined]
