"""Finish an admitted request: end its leases, and give back its cost after a server error.

Leases end when the response is made, or for a stream when it has ended or was closed. At the latest they end when
Django closes the request, which it does after it has sent the response. So the leases of a throttle end too, although
a throttle sees no response.

No function here raises an error of its own, since the response is on its way. It logs what could not be done.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.engine import AlreadySettled, Decision, Receipt, Stale, Unavailable, arefund, arelease, refund, release
from ratelimits.quota.checking import Answer

logger = logging.getLogger(__name__)

_Step = Callable[[Receipt], Decision]
_Steps = list[tuple[_Step, Receipt]]
_AWAITED: dict[_Step, Callable[[Receipt], Awaitable[Decision]]] = {refund: arefund, release: arelease}
#: The errors with which a request ends after its client has gone.
_GONE = (asyncio.CancelledError, concurrent.futures.CancelledError)
#: The errors with which a step fails: Stale if the server's clock enters another calendar window at this moment.
_FAILURES = (Unavailable, ResponseError, Stale)
_OPEN = "_ratelimits_open"
_ABANDONED = "_ratelimits_abandoned"


class _Open:
    """The answers of a request whose charge or leases may still be given back, each once, by any entry point."""

    __slots__ = ("charged", "leased", "watched")

    def __init__(self) -> None:
        self.charged: list[Answer] = []
        self.leased: list[Answer] = []
        #: The response whose stream ends the leases, if it streams.
        self.watched: HttpResponseBase | None = None


def begin(request: Any, answer: Answer) -> None:
    """Set Django's `request.quota` to the answer. If it admits, prepare what its end refunds and releases."""
    request.quota = answer
    if not answer.allowed or answer.decision is None:
        return
    attributes = vars(request)
    open_ = attributes.get(_OPEN)
    if open_ is None:
        open_ = attributes[_OPEN] = _Open()
    open_.charged.append(answer)
    if answer.prepared is not None and answer.prepared.leases:
        open_.leased.append(answer)
        request.close = partial(_close, request)


def _close(request: Any) -> None:
    # Remove this method, so that the class's own one is called and the request does not refer to itself.
    vars(request).pop("close", None)
    try:
        end(request)
    finally:
        request.close()


def finish(request: HttpRequest, response: HttpResponseBase) -> None:
    """Finish a request whose response is made: refund it for a status of 500 or above, unless BILL_ERRORS is set.

    End its leases, unless the response streams: then they end with the stream.
    """
    _run(_steps(request, failed=response.status_code >= 500, ended=not _streams(request, response)))


async def afinish(request: HttpRequest, response: HttpResponseBase) -> None:
    """Do as `finish`, awaited."""
    await _arun(_steps(request, failed=response.status_code >= 500, ended=not _streams(request, response)))


def leave(request: HttpRequest, response: HttpResponseBase) -> None:
    """End the leases of a request whose view has returned. Refund nothing: the middleware sees the final status."""
    _run(_steps(request, ended=_made(response) and not _streams(request, response)))


async def aleave(request: HttpRequest, response: HttpResponseBase) -> None:
    """Do as `leave`, awaited."""
    await _arun(_steps(request, ended=_made(response) and not _streams(request, response)))


def end(request: Any) -> None:
    """End the leases of a request."""
    _run(_steps(request))


async def aend(request: Any) -> None:
    """Do as `end`, awaited."""
    await _arun(_steps(request))


def fail(request: HttpRequest, error: BaseException) -> None:
    """Finish a request that ends without a response.

    End its leases. If the client has gone, the charge stays, since work was begun. Any other error is a server error.
    """
    _run(_steps(request, failed=not isinstance(error, _GONE)))


async def afail(request: HttpRequest, error: BaseException) -> None:
    """Do as `fail`, awaited, even if the caller is cancelled. Wait for a sync view that still runs in its thread.

    If that view has not begun, because its request is still being decided or waits, it will not begin.
    """
    if isinstance(error, _GONE):
        vars(request)[_ABANDONED] = True
    await _surely(partial(fail, request, error))


def is_abandoned(request: HttpRequest | None) -> bool:
    """Return whether a request's client is known to have gone."""
    return request is not None and _ABANDONED in vars(request)


def give_back(answer: Answer) -> None:
    """Refund an answer whose request has not begun."""
    receipt = answer.decision.receipt if answer.decision is not None else None
    if receipt is not None:
        _run([(refund, receipt)])


async def agive_back(answer: Answer) -> None:
    """Do as `give_back`, awaited, even if the caller is cancelled."""
    if answer.decision is not None and answer.decision.receipt is not None:
        await _surely(partial(give_back, answer))


def _steps(request: Any, *, failed: bool = False, ended: bool = True) -> _Steps:
    """Return the steps for a request that has failed or ended, and remove them, so that each is done once."""
    open_: _Open | None = vars(request).get(_OPEN)
    if open_ is None:
        return []
    steps: _Steps = []
    if failed and not conf.BILL_ERRORS:
        steps += _taken(open_.charged, refund)
    if ended:
        steps += _taken(open_.leased, release)
    return steps


def refunded(request: Any, receipt: Receipt) -> None:
    """Note that a request's view has refunded a receipt, so that its end does not refund it again."""
    open_: _Open | None = vars(getattr(request, "_request", request)).get(_OPEN)
    if open_ is not None:
        open_.charged[:] = [each for each in open_.charged if each.decision is None or each.decision.receipt != receipt]


def _taken(answers: list[Answer], step: _Step) -> Iterator[tuple[_Step, Receipt]]:
    while answers:
        try:
            decision = answers.pop().decision
        except IndexError:  # another thread was faster
            return
        receipt = decision.receipt if decision is not None else None
        if receipt is not None:
            yield step, receipt


def _run(steps: _Steps, *, again: bool = False) -> None:
    for step, receipt in steps:
        try:
            step(receipt)
        except AlreadySettled:
            if not again:
                _stays(receipt)
        except _FAILURES as error:
            _log(step, receipt, error)


async def _arun(steps: _Steps) -> None:
    try:
        for step, receipt in steps:
            try:
                await _AWAITED[step](receipt)
            except AlreadySettled:
                _stays(receipt)
            except _FAILURES as error:
                _log(step, receipt, error)
    except asyncio.CancelledError:
        # Each step takes effect once, so it is safe to repeat all of them.
        await _surely(partial(_run, steps, again=True))
        raise


def _stays(receipt: Receipt) -> None:
    logger.warning(
        "A request that was settled ended in a server error: what it was settled at stays billed (receipt %s)."
        " Settle when nothing can fail any more, or settle at 0.",
        receipt.nonce,
    )


def _log(step: _Step, receipt: Receipt, error: Exception) -> None:
    name = getattr(step, "__name__", step)
    logger.error("%s of receipt %s failed at the end of its request: %s", name, receipt.nonce, error)


_running: set[asyncio.Future[None]] = set()


async def _surely(do: Callable[[], None]) -> None:
    """Call `do` in the request's own thread, after what still runs there, even if the caller is cancelled again."""
    doing = asyncio.ensure_future(sync_to_async(do)())
    _running.add(doing)  # an event loop does not keep its tasks alive
    doing.add_done_callback(_running.discard)
    await asyncio.shield(doing)


def _made(response: Any) -> bool:
    """Return whether a response is complete: a template may be rendered after the view has returned."""
    return getattr(response, "is_rendered", True) is True


def _streams(request: Any, response: Any) -> bool:
    """Return whether leases end later, with the response's stream. If so, make the stream end them."""
    open_: _Open | None = vars(request).get(_OPEN)
    if not getattr(response, "streaming", False) or open_ is None or not open_.leased:
        return False
    # A WSGI server may send a file itself, and closes it afterwards.
    by_server = isinstance(request, WSGIRequest) and getattr(response, "file_to_stream", None) is not None
    if open_.watched is not response and not by_server:
        open_.watched = response
        watch = _awatched if response.is_async else _watched
        response.streaming_content = watch(request, response.streaming_content)
    return True


def _watched(request: Any, content: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from content
    except BaseException:
        # Django's ASGI handler does not close a response whose stream fails.
        end(request)
        raise
    # The ASGI handler reads the whole stream before it sends any. There the lease ends when the response is closed.
    if isinstance(request, WSGIRequest):
        end(request)


async def _awatched(request: Any, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in content:
            yield part
    finally:
        await aend(request)
