"""Views that run until their client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path

from ratelimits.decorators import limited


def pieces() -> Iterator[bytes]:
    while True:
        yield b"piece"
        time.sleep(0.01)


@limited()
def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(pieces())


@limited()
async def work(request: HttpRequest) -> HttpResponse:
    await asyncio.Event().wait()
    raise AssertionError


@limited()
async def done(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


@limited()
def sync(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


def up(request: HttpRequest) -> HttpResponse:
    return HttpResponse("up")


urlpatterns = [path("", up), path("stream/", stream), path("work/", work), path("done/", done), path("sync/", sync)]
