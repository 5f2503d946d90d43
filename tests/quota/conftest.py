from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ratelimits import rules
from tests.support.eventually import PATIENCE


@pytest.fixture(autouse=True)
def _connections_of_threads() -> Iterator[None]:
    """Close the database connections that other threads opened and left open.

    Django closes them only at a later request of the same thread. PostgreSQL deletes no database that has one. The
    app's own threads close theirs: to close one while its thread reads would end the process.
    """
    own, opened = threading.current_thread(), []

    def note(connection: BaseDatabaseWrapper, **_about: Any) -> None:
        thread = threading.current_thread()
        if thread is not own and not thread.name.startswith("ratelimits-"):
            opened.append(connection)

    connection_created.connect(note)
    yield
    connection_created.disconnect(note)
    # What reads the rules still, because a test did not wait for it, would read them within the next test.
    rules._loader._thread.submit(int).result(PATIENCE)
    for connection in opened:
        connection.inc_thread_sharing()  # its thread has ended, or waits for more work
        connection.close()
        connection.dec_thread_sharing()
