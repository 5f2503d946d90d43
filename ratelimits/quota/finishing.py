"""The end of an admitted request: its leases end, and what a server error cost is given back.

A lease ends when the response is made, and that of a stream when the stream has ended or was closed. As a last resort
it ends when Django closes the request, which it does with the response that it sent, whoever made that: so a throttle
alone, which sees no response, has its leases ended as well.

Nothing here raises an error of its own: the response is on its way. What could not be done is logged.
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
from ratelimits.engine import AlreadySettled, Decision, Receipt, Unavailable, arefund, arelease, refund, release
from ratelimits.quota.checking import Answer

logger = logging.getLogger(__name__)

_Step = Callable[[Receipt], Decision]
_Steps = list[tuple[_Step, Receipt]]
_AWAITED: dict[_Step, Callable[[Receipt], Awaitable[Decision]]] = {refund: arefund, release: arelease}
#: How a request ends that nobody waits for any longer.
_GONE = (asyncio.CancelledError, concurrent.futures.CancelledError)
_OPEN = "_ratelimits_open"
_ABANDONED = "_ratelimits_abandoned"


class _Open:
    """What a request was admitted with and may still give back: by any of its entry points, each once."""

    __slots__ = ("charged", "leased", "watched")

    def __init__(self) -> None:
        self.charged: list[Answer] = []
        self.leased: list[Answer] = []
        #: The response whose stream ends the leases.
        self.watched: HttpResponseBase | None = None


def begin(request: Any, answer: Answer) -> None:
    """Keep the answer as `request.quota`, and, if it admits, see to the end of what it took. For Django's request."""
    request.quota = answer
    if not answer.allowed or answer.decision is None:
        return
    attributes = vars(request)
    held = attributes.get(_OPEN)
    if held is None:
        held = attributes[_OPEN] = _Open()
    held.charged.append(answer)
    if answer.prepared is not None and answer.prepared.leases:
        held.leased.append(answer)
        request.close = partial(_close, request)


def _close(request: Any) -> None:
    # What was put there goes, so that the class's own is next and the request refers to itself no longer.
    vars(request).pop("close", None)
    try:
        end(request)
    finally:
        request.close()


def finish(request: HttpRequest, response: HttpResponseBase) -> None:
    """Finish a request whose response is made: refund a status of 500 or more, unless BILL_ERRORS; end its leases.

    The leases of a stream end with it.
    """
    _run(_steps(request, failed=response.status_code >= 500, ended=not _streams(request, response)))


async def afinish(request: HttpRequest, response: HttpResponseBase) -> None:
    """`finish`, awaited."""
    await _arun(_steps(request, failed=response.status_code >= 500, ended=not _streams(request, response)))


def leave(request: HttpRequest, response: HttpResponseBase) -> None:
    """End the leases of a request whose view has returned. What its status costs is for whoever sees the last one."""
    _run(_steps(request, ended=_made(response) and not _streams(request, response)))


async def aleave(request: HttpRequest, response: HttpResponseBase) -> None:
    """`leave`, awaited."""
    await _arun(_steps(request, ended=_made(response) and not _streams(request, response)))


def end(request: Any) -> None:
    """End the leases of a request."""
    _run(_steps(request))


async def aend(request: Any) -> None:
    """`end`, awaited."""
    await _arun(_steps(request))


def fail(request: HttpRequest, error: BaseException) -> None:
    """Finish a request that ends without a response.

    Where the client has gone, its leases end and its charge stays: work was begun for it. All else is a server error.
    """
    _run(_steps(request, failed=not isinstance(error, _GONE)))


async def afail(request: HttpRequest, error: BaseException) -> None:
    """`fail`, awaited, also by who is cancelled. After a sync view that may still run in the request's thread.

    A view that has not begun there, as its request is decided or held back, does not begin any more.
    """
    if isinstance(error, _GONE):
        vars(request)[_ABANDONED] = True
    await _surely(partial(fail, request, error))


def is_abandoned(request: HttpRequest | None) -> bool:
    """Return whether a request's client is known to have gone away."""
    return request is not None and _ABANDONED in vars(request)


def give_back(answer: Answer) -> None:
    """Refund an answer whose request never began."""
    receipt = answer.decision.receipt if answer.decision is not None else None
    if receipt is not None:
        _run([(refund, receipt)])


async def agive_back(answer: Answer) -> None:
    """`give_back`, awaited, also by who is cancelled."""
    if answer.decision is not None and answer.decision.receipt is not None:
        await _surely(partial(give_back, answer))


def _steps(request: Any, *, failed: bool = False, ended: bool = True) -> _Steps:
    """Take what is to be done for a request that has failed or ended, so that nobody else does it."""
    held: _Open | None = vars(request).get(_OPEN)
    if held is None:
        return []
    steps: _Steps = []
    if failed and not conf.BILL_ERRORS:
        steps += _taken(held.charged, refund)
    if ended:
        steps += _taken(held.leased, release)
    return steps


def refunded(request: Any, receipt: Receipt) -> None:
    """Know that a request's view has given back what it cost: nothing is left to refund at its end."""
    held: _Open | None = vars(getattr(request, "_request", request)).get(_OPEN)
    if held is not None:
        held.charged[:] = [each for each in held.charged if each.decision is None or each.decision.receipt != receipt]


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
        except (Unavailable, ResponseError) as error:
            _log(step, receipt, error)


async def _arun(steps: _Steps) -> None:
    try:
        for step, receipt in steps:
            try:
                await _AWAITED[step](receipt)
            except AlreadySettled:
                _stays(receipt)
            except (Unavailable, ResponseError) as error:
                _log(step, receipt, error)
    except asyncio.CancelledError:
        # Each takes effect once, so whichever were done may be done again.
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
    """Do something in the request's own thread, after what still runs there, even if the caller is cancelled again."""
    doing = asyncio.ensure_future(sync_to_async(do)())
    _running.add(doing)  # a loop keeps no task alive
    doing.add_done_callback(_running.discard)
    await asyncio.shield(doing)


def _made(response: Any) -> bool:
    """Return whether a response is made: a template may be rendered after the view."""
    return getattr(response, "is_rendered", True) is True


def _streams(request: Any, response: Any) -> bool:
    """Return whether leases end later, with the response's stream, and see to that."""
    held: _Open | None = vars(request).get(_OPEN)
    if not getattr(response, "streaming", False) or held is None or not held.leased:
        return False
    # A WSGI server may send a file by itself, and closes it when it is sent.
    by_server = isinstance(request, WSGIRequest) and getattr(response, "file_to_stream", None) is not None
    if held.watched is not response and not by_server:
        held.watched = response
        watch = _awatched if response.is_async else _watched
        response.streaming_content = watch(request, response.streaming_content)
    return True


def _watched(request: Any, content: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from content
    except BaseException:
        # Django's ASGI handler does not close the response of a stream that fails.
        end(request)
        raise
    # That handler has read all of it before it sends any: there the lease ends as the response is closed.
    if isinstance(request, WSGIRequest):
        end(request)


async def _awatched(request: Any, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in content:
            yield part
    finally:
        await aend(request)
