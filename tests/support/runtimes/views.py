"""Views of tests/runtimes, sync and async. Each answers with the number of its process."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from django.http import HttpRequest, HttpResponse
from django.urls import path

from ratelimits.decorators import limited

#: A view under the scope `hold` makes the first file when it begins, and runs until the second file exists.
HELD, RELEASE = Path(os.environ["HELD"]), Path(os.environ["RELEASE"])


def _answer() -> HttpResponse:
    return HttpResponse(str(os.getpid()))


def free(request: HttpRequest) -> HttpResponse:
    return _answer()


async def afree(request: HttpRequest) -> HttpResponse:
    return _answer()


@limited("many")
def many(request: HttpRequest) -> HttpResponse:
    return _answer()


@limited("many")
async def amany(request: HttpRequest) -> HttpResponse:
    return _answer()


@limited("wide")
def wide(request: HttpRequest) -> HttpResponse:
    return _answer()


@limited("wide")
async def awide(request: HttpRequest) -> HttpResponse:
    return _answer()


@limited("hold")
def hold(request: HttpRequest) -> HttpResponse:
    HELD.touch()
    while not RELEASE.exists():
        time.sleep(0.01)
    return _answer()


@limited("hold")
async def ahold(request: HttpRequest) -> HttpResponse:
    await asyncio.to_thread(HELD.touch)
    while not await asyncio.to_thread(RELEASE.exists):  # noqa: ASYNC110  (the test makes the file)
        await asyncio.sleep(0.01)
    return _answer()


urlpatterns = [
    path("", afree),
    *(path(f"sync/{view.__name__}/", view) for view in (free, many, wide, hold)),
    *(path(f"async/{view.__name__[1:]}/", view) for view in (afree, amany, awide, ahold)),
]
