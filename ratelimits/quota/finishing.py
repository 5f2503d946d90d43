"""Finish an admitted request: end its leases, and refund it after a server error.

A lease is a place under a `concurrency` limit. Leases end when the response is made. The leases of a streaming response
end when its stream has ended or was closed. At the latest, leases end when Django closes the request after sending the
response. Leases of the throttle class end only then, because the throttle class does not see the response.

If a refund or a release fails, the functions here log the error and do not raise it: the response must still be sent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from redis.exceptions import ResponseError

from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine import AlreadySettled, Decision, Receipt, Stale, Unavailable, arefund, arelease, refund, release
from ratelimits.logs import bounded

logger = bounded(__name__)

_Step = Callable[[Receipt], Decision]
_Steps = list[tuple[_Step, Receipt]]
#: The async version of each step.
_ASYNC_STEPS: dict[_Step, Callable[[Receipt], Awaitable[Decision]]] = {refund: arefund, release: arelease}
#: The errors that end a request after its client has closed the connection.
_CLIENT_GONE = (asyncio.CancelledError, concurrent.futures.CancelledError)
#: The errors of a failed refund or release. Stale occurs if a new calendar window begins at this moment.
_FAILURES = (Unavailable, ResponseError, Stale)
#: An attribute of Django's request: a list of the answers that are refunded if the request fails. Several entry points
#: can finish the same request. The first of them removes an answer from this list or from the list `_LEASED`. So each
#: answer is refunded or released only once.
_CHARGED = "_ratelimits_charged"
#: An attribute of Django's request: a list of the answers whose leases must end.
_LEASED = "_ratelimits_leased"
#: An attribute of Django's request: the streaming response whose end also ends the leases.
_WATCHED = "_ratelimits_watched"
#: An attribute of Django's request. The request has it if its client has closed the connection.
_ABANDONED = "_ratelimits_abandoned"


def begin(request: Any, answer: Answer) -> None:
    """Set Django's `request.quota` to the answer. If the request is admitted, prepare its refund and its release."""
    request.quota = answer
    # Without a decision of Redis nothing was charged.
    if not answer.allowed or answer.decision is None:
        return
    attributes = vars(request)
    if _CHARGED in attributes:
        attributes[_CHARGED].append(answer)
    else:
        attributes[_CHARGED] = [answer]
    if answer.prepared is not None and answer.prepared.leases:
        attributes.setdefault(_LEASED, []).append(answer)
        request.close = partial(_close, request)


def _close(request: Any) -> None:
    # Remove this function from the request. Then request.close() below calls the method of the class.
    vars(request).pop("close", None)
    try:
        end(request)
    finally:
        request.close()


def finish(request: HttpRequest, response: HttpResponseBase) -> None:
    """Finish a request that has a response. Refund it if the status is 500 or above and BILL_ERRORS is false.

    End its leases. If the response streams, the leases end later, with the stream.
    """
    _run(_steps(request, failed=response.status_code >= 500, ended=not _ends_with_stream(request, response)))


async def afinish(request: HttpRequest, response: HttpResponseBase) -> None:
    """Do the same as `finish`, in async code."""
    await _arun(_steps(request, failed=response.status_code >= 500, ended=not _ends_with_stream(request, response)))


def leave(request: HttpRequest, response: HttpResponseBase) -> None:
    """End the leases of a request whose view has returned.

    If the response is not rendered yet, or streams, the leases end later.

    Do not refund the request. The middleware does this, because it knows the final status.
    """
    _run(_steps(request, ended=_is_rendered(response) and not _ends_with_stream(request, response)))


async def aleave(request: HttpRequest, response: HttpResponseBase) -> None:
    """Do the same as `leave`, in async code."""
    await _arun(_steps(request, ended=_is_rendered(response) and not _ends_with_stream(request, response)))


def end(request: Any) -> None:
    """End the leases of a request."""
    _run(_steps(request))


async def aend(request: Any) -> None:
    """Do the same as `end`, in async code."""
    await _arun(_steps(request))


def fail(request: HttpRequest, error: BaseException) -> None:
    """Finish a request that ends without a response.

    End its leases, and refund it if BILL_ERRORS is false. If the client has closed the connection, do not refund the
    request, because work for it has already begun.
    """
    _run(_steps(request, failed=not isinstance(error, _CLIENT_GONE)))


async def afail(request: HttpRequest, error: BaseException) -> None:
    """Do the same as `fail`, in async code, even if the caller is cancelled.

    If a sync view still runs in its thread, wait until the view ends. If the client has gone, mark the request (see
    `is_abandoned`). If a marked request is still being decided, or waits for its permits, its view will not begin.
    """
    if isinstance(error, _CLIENT_GONE):
        vars(request)[_ABANDONED] = True
    await _call_despite_cancellation(partial(fail, request, error))


def is_abandoned(request: HttpRequest | None) -> bool:
    """Return whether the request's client is known to have closed the connection."""
    return request is not None and _ABANDONED in vars(request)


def give_back(answer: Answer) -> None:
    """Refund a request whose view has not begun."""
    receipt = answer.decision.receipt if answer.decision is not None else None
    if receipt is not None:
        _run([(refund, receipt)])


async def agive_back(answer: Answer) -> None:
    """Do the same as `give_back`, in async code, even if the caller is cancelled."""
    if answer.decision is not None and answer.decision.receipt is not None:
        await _call_despite_cancellation(partial(give_back, answer))


def end_leases(receipt: Receipt) -> None:
    """End the leases of a receipt that belongs to no request."""
    _run([(release, receipt)])


async def aend_leases(receipt: Receipt) -> None:
    """Do the same as `end_leases`, in async code, even if the caller is cancelled."""
    await _arun([(release, receipt)])


def _steps(request: Any, *, failed: bool = False, ended: bool = True) -> _Steps:
    """Return the refunds and releases that a request needs after it has failed or ended. No later call returns them."""
    attributes = vars(request)
    steps: _Steps = []
    if failed and _CHARGED in attributes and not conf.BILL_ERRORS:
        steps += _take_steps(attributes[_CHARGED], refund)
    if ended and _LEASED in attributes:
        steps += _take_steps(attributes[_LEASED], release)
    return steps


def note_refund(request: Any, receipt: Receipt) -> None:
    """Remember that a view has refunded a receipt, so that it is not refunded again when the request ends."""
    django_request = getattr(request, "_request", request)  # a request of DRF contains Django's request
    charged: list[Answer] = vars(django_request).get(_CHARGED, [])
    charged[:] = [answer for answer in charged if answer.decision is None or answer.decision.receipt != receipt]


def _take_steps(answers: list[Answer], step: _Step) -> Iterator[tuple[_Step, Receipt]]:
    while answers:
        try:
            decision = answers.pop().decision
        except IndexError:  # another thread was faster
            return
        receipt = decision.receipt if decision is not None else None
        if receipt is not None:
            yield step, receipt


def _run(steps: _Steps, *, again: bool = False) -> None:
    """Do the steps. `again` is true if some of them were perhaps done before."""
    for step, receipt in steps:
        try:
            step(receipt)
        except AlreadySettled:
            if not again:
                _log_still_billed(receipt)
        except _FAILURES as error:
            _log_failure(step, receipt, error)


async def _arun(steps: _Steps) -> None:
    try:
        for step, receipt in steps:
            try:
                await _ASYNC_STEPS[step](receipt)
            except AlreadySettled:
                _log_still_billed(receipt)
            except _FAILURES as error:
                _log_failure(step, receipt, error)
    except asyncio.CancelledError:
        # Do all steps again, because some were perhaps not done. This is safe: each step takes effect only once.
        await _call_despite_cancellation(partial(_run, steps, again=True))
        raise


def _log_still_billed(receipt: Receipt) -> None:
    logger.warning(
        "A settled request ended in a server error. It stays billed at its settled cost (receipt %s)."
        " Settle a request only when nothing can fail any more. If its work has failed already, settle it at 0.",
        receipt.nonce,
    )


def _log_failure(step: _Step, receipt: Receipt, error: Exception) -> None:
    name = getattr(step, "__name__", step)
    logger.error("%s of receipt %s failed at the end of its request: %s", name, receipt.nonce, error)


#: The tasks of `_call_despite_cancellation` that have not ended.
_running: set[asyncio.Future[None]] = set()


async def _call_despite_cancellation(do: Callable[[], None]) -> None:
    """Call `do` in the request's thread, after the work that this thread does now, even if the caller is cancelled."""
    task = asyncio.ensure_future(sync_to_async(do)())
    _running.add(task)  # a reference is needed: an event loop has only weak references to its tasks
    task.add_done_callback(_running.discard)
    await asyncio.shield(task)


def _is_rendered(response: Any) -> bool:
    """Return whether the response is rendered. Django can render a template after the view has returned."""
    return getattr(response, "is_rendered", True) is True


def _ends_with_stream(request: Any, response: Any) -> bool:
    """Return whether the leases end with the response's stream. If so, change the stream: its end ends the leases."""
    attributes = vars(request)
    if not attributes.get(_LEASED) or not getattr(response, "streaming", False):
        return False
    # A WSGI server can send a file without this stream. Then the leases end when the server closes the response.
    sent_by_server = isinstance(request, WSGIRequest) and getattr(response, "file_to_stream", None) is not None
    if attributes.get(_WATCHED) is not response and not sent_by_server:
        attributes[_WATCHED] = response
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
    # Django's ASGI handler reads the whole stream of a sync iterator before it sends anything. So the leases end
    # later, when the handler closes the response.
    if isinstance(request, WSGIRequest):
        end(request)


async def _awatched(request: Any, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in content:
            yield part
    finally:
        await aend(request)
