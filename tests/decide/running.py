"""Run the project in site.py in a process of its own, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]


def settings_of(url: str, **ratelimits: Any) -> dict[str, Any]:
    """Return the settings of a project with this server."""
    limits = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    other = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    return {
        "CACHES": {"default": other, "limits": limits},
        "RATELIMITS": {"CACHE_ALIAS": "limits", "NAMESPACE": "bare", **ratelimits},
    }


def site(folder: Path, name: str, more: dict[str, Any]) -> dict[str, Any]:
    """Run the site in a new interpreter, and return what it printed. What it has imported is what it needs."""
    printed: dict[str, Any] = json.loads(
        _printed(subprocess.run, folder, "-m", "tests.decide.site", name, json.dumps(more))
    )
    return printed


def script(folder: Path, text: str, more: dict[str, Any], *, fails: bool = False) -> str:
    """Run a script in the site without apps, with more settings; return its output, or its errors if it fails."""
    begin = f"from tests.decide.site import *\nstart('no apps', json.loads({json.dumps(more)!r}))\n"
    return _printed(forked.run, folder, "-c", begin + textwrap.dedent(text), fails=fails)


def _printed(
    run: Callable[..., subprocess.CompletedProcess[str]], folder: Path, *arguments: str, fails: bool = False
) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "PYTEST"))}
    done = run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout
