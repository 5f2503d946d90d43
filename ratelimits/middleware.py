"""The middleware. It limits plain Django views by path, and finishes every admitted request.

To finish a request means to refund it after a server error, and to end its leases (its places under a `concurrency`
limit). The middleware also finishes requests that the throttle or the decorator has admitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve

from ratelimits.conf import conf
from ratelimits.identity import aidentify, identify
from ratelimits.quota import finishing
from ratelimits.quota.answers.answer import ONE_REQUEST
from ratelimits.quota.answers.responses import arefusal, refusal, with_headers
from ratelimits.quota.waiting import acheck_and_wait, check_and_wait

GetResponse = Callable[[HttpRequest], HttpResponseBase] | Callable[[HttpRequest], Awaitable[HttpResponseBase]]


def governed(request: HttpRequest) -> bool:
    """Return whether the middleware limits a request.

    The request's path must be in PATHS. A view of DRF, or a view with the decorator, limits its requests itself.
    """
    if not any(request.path.startswith(prefix) for prefix in conf.PATHS):
        return False
    try:
        view = resolve(request.path_info, getattr(request, "urlconf", None)).func
    except Resolver404:
        return True
    return not hasattr(view, "cls") and not hasattr(view, "ratelimits")


class QuotaMiddleware:
    """The middleware that limits paths and finishes requests. Place it after `AuthenticationMiddleware`.

    Rules with the scope "*" apply to these paths.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        self._async = iscoroutinefunction(get_response)
        if self._async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self._async:
            return self._answer(request)
        answer = None
        if governed(request):
            answer = check_and_wait(identify(request), "*", request.method or "", ONE_REQUEST, request)
            finishing.begin(request, answer)
            if not answer.allowed:
                return refusal(request, answer)
        try:
            response = cast("HttpResponseBase", self.get_response(request))
        except BaseException as error:
            finishing.fail(request, error)
            raise
        finishing.finish(request, response)
        return response if answer is None else with_headers(response, answer)

    async def _answer(self, request: HttpRequest) -> HttpResponseBase:
        answer = None
        if governed(request):
            answer = await acheck_and_wait(await aidentify(request), "*", request.method or "", ONE_REQUEST)
            finishing.begin(request, answer)
            if not answer.allowed:
                return await arefusal(request, answer)
        try:
            response = await cast("Awaitable[HttpResponseBase]", self.get_response(request))
        except BaseException as error:
            await finishing.afail(request, error)
            raise
        await finishing.afinish(request, response)
        return response if answer is None else with_headers(response, answer)
