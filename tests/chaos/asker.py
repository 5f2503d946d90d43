"""Ask for decisions in several processes, like web workers, until the standard input ends.

`python -m tests.chaos.asker SEED PROCESSES PAUSE` takes the settings CACHES and RATELIMITS from the variable
CHAOS_SETTINGS (JSON). If there is a variable CHAOS_CLOCK, the processes have the clock of this file. Each process
writes a JSON list to the standard output when it begins, for each request and for each exception.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from functools import partial
from pathlib import Path

import django
from django.conf import settings

from tests.chaos.clocks import follow
from tests.support.usage.background import forked


def _write(*values: object) -> None:
    os.write(1, f"{json.dumps(values)}\n".encode())


def _ended() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def _child(pause: float, number: int, rng: random.Random) -> None:
    from ratelimits import background
    from tests.chaos.load import ask

    _write("begins")
    ask(rng, f"p{number}", pause, _ended, lambda one: _write("request", *one), partial(_write, "error"))
    background.end()
    os._exit(0)


def main(seed: str, processes: int, pause: float) -> None:
    for name, value in json.loads(os.environ["CHAOS_SETTINGS"]).items():
        setattr(settings, name, value)
    django.setup()
    if "CHAOS_CLOCK" in os.environ:
        follow(Path(os.environ["CHAOS_CLOCK"]))
    pids = [forked(partial(_child, pause), number, seed) for number in range(processes)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(ends, key=abs))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
