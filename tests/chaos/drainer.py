"""Seal and drain without end, as a worker does.

`python -m tests.chaos.drainer` writes a line before and after each drain: "begins", then "drained" or the error's name.
"""

from __future__ import annotations

import os
import time

import django

#: Seconds between two drains.
PAUSE = 0.2


def main() -> None:
    django.setup()
    from django.db import close_old_connections

    from ratelimits.usage import tasks

    while True:
        os.write(1, b"begins\n")
        try:
            tasks.seal()
            tasks.drain()
            os.write(1, b"drained\n")
        except Exception as error:  # noqa: BLE001  (Celery logs it, and starts the next task)
            os.write(1, f"{type(error).__name__}\n".encode())
        close_old_connections()
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
