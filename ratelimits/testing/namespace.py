"""Give a part of a test its own Redis keys, so that no permit is spent when this part begins."""

from __future__ import annotations

from collections.abc import Callable

from ratelimits import rules
from ratelimits.engine.server import isolate, test_suffix
from ratelimits.quota import from_memory
from ratelimits.testing.preparing import prepare_tests
from ratelimits.testing.server import start_server_if_needed
from ratelimits.testing.transactions import django_tests


def enter() -> Callable[[], None]:
    """Use a new namespace from now on. Return a function that changes back to the former namespace."""
    prepare_tests()  # A test runner that does not know the app has not called it.
    start_server_if_needed()
    django_tests.follow()
    previous, current = test_suffix(), django_tests.new_suffix()
    isolate(current, delete=False)  # Keep the former namespace's Redis keys: `leave` returns to them.
    _forget()

    def leave() -> None:
        django_tests.follow()
        # If another test has begun in the meantime, that test uses its own namespace. Keep the namespace of that test.
        if test_suffix() == current:
            isolate(previous)
        _forget()

    return leave


def _forget() -> None:
    """Forget what this process remembers about requests in another namespace."""
    from_memory.denials.clear()
    rules.forget()
