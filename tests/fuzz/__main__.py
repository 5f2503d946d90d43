"""Feed random inputs to what reads them: `python -m tests.fuzz [--inputs 100000] [name of a target …]`.

It needs atheris (`pip install atheris`), which chooses inputs that reach new lines. Ends with status 1 at the first
input that raises an unexpected exception or takes more than ten seconds; the input is in the file that is named last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def _fuzz(name: str, inputs: int, folder: Path) -> None:
    """Feed one target. Does not return: libFuzzer ends the process."""
    atheris: Any = import_module("atheris")

    with atheris.instrument_imports(include=["ratelimits"]):
        import django

        django.setup()
        from tests.fuzz.targets import TARGETS

    target = next(target for target in TARGETS if target.name == name)
    for number, text in enumerate(target.valid):
        (folder / f"valid-{number}").write_bytes(text)
    options = [
        f"-atheris_runs={inputs}",
        f"-runs={inputs}",
        "-timeout=10",
        "-verbosity=0",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], target.feed)
    atheris.Fuzz()


def main() -> int:
    """Feed each target in a process of its own, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    if arguments.one:
        _fuzz(arguments.one, arguments.inputs, arguments.folder)
    import django

    django.setup()
    from tests.fuzz.targets import TARGETS

    total, failed = 0, 0
    for target in TARGETS:
        if arguments.targets and target.name not in arguments.targets:
            continue
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="ratelimits-fuzz-"))
        command = [sys.executable, "-m", "tests.fuzz", "--one", target.name, "--inputs", str(arguments.inputs)]
        done = subprocess.run([*command, "--folder", str(folder)], capture_output=True, text=True, check=False)
        # The status says nothing: at the end, Python may be stopped while its threads run.
        faults = [file.name for file in folder.iterdir() if file.name.startswith(("crash-", "timeout-", "oom-"))]
        is_done = f"Done {arguments.inputs}" in done.stderr and not faults
        total, failed = total + arguments.inputs, failed + (not is_done)
        result = "ok" if is_done else f"FAILED, see {folder}\n{done.stderr[-3000:]}"
        print(
            f"{target.name:28} {arguments.inputs:12,} inputs {time.monotonic() - started:7.1f} s  {result}", flush=True
        )
    print(f"{total:,} inputs, {failed} targets failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
