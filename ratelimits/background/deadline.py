"""Ask a server that perhaps hangs, and wait no longer than a given time for all of its answers together."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread


def within(seconds: float, work: Callable[[], None], name: str) -> None:
    """Do the work in a thread of this name, and raise what the work raises.

    Raise TimeoutError if the work takes longer than `seconds`. A timeout of a socket is not enough: it limits only a
    single wait. Connecting is one wait, and each part of a reply is another one. After a TimeoutError, the thread goes
    on with the work. So each single wait of the work needs a timeout too, or else the thread could run for ever. The
    work must not use a database.
    """
    outcome = SimpleQueue[BaseException | None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised again below, in the thread of the caller)
            outcome.put(error)
        else:
            outcome.put(None)

    Thread(target=run, daemon=True, name=name).start()
    try:
        error = outcome.get(timeout=max(seconds, 0.0))
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
