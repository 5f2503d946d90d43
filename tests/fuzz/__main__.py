"""Feed random inputs to what reads them: `python -m tests.fuzz [--inputs 10000000] [name of a parser …]`.

It needs atheris (`pip install atheris`), which chooses inputs that reach new lines. The inputs are divided evenly among
the parsers. A parser ends at its first crash (an exception that it does not declare) or hang (ten seconds for one
input). Then the status is 1, and the input is in the folder that is named. `--write` writes the table into a page.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tests.support import page_tables

if TYPE_CHECKING:
    from tests.fuzz.targets import Target


class Result(NamedTuple):
    """What became of the inputs of one parser. `broken` means that the process ended without a known reason."""

    parser: str
    inputs: int
    crashes: int
    hangs: int
    seconds: float
    broken: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the line of a table."""
        return (self.parser, f"{self.inputs:,}", f"{self.crashes:,}", f"{self.hangs:,}", f"{self.seconds:,.0f}")


def _fuzz(atheris: Any, target: Target, inputs: int, folder: Path) -> NoReturn:
    """Feed one parser in this process. libFuzzer ends the process; the end of its log says how."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number, text in enumerate(target.valid):
        (folder / f"valid-{number}").write_bytes(text)
    options = [
        f"-atheris_runs={inputs}",
        f"-runs={inputs}",
        "-timeout=10",
        "-verbosity=0",
        f"-artifact_prefix={folder}/",
    ]
    with target.around():
        atheris.Setup([sys.argv[0], *options, str(folder)], target.feed)
        atheris.Fuzz()
    os._exit(1)


def _result(atheris: Any, target: Target, inputs: int, folder: Path) -> Result:
    """Feed one parser in a process of its own."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _fuzz(atheris, target, inputs, folder)
    os.waitpid(child, 0)  # The status says nothing: at the end, Python may be stopped while its threads run.
    seconds = time.monotonic() - started
    names = [file.name for file in folder.iterdir()]
    crashes = sum(name.startswith(("crash-", "oom-")) for name in names)
    hangs = sum(name.startswith("timeout-") for name in names)
    broken = not crashes + hangs and f"Done {inputs}" not in (folder / "log").read_text(errors="replace")
    return Result(target.name, inputs, crashes, hangs, seconds, broken)


def main() -> int:
    """Feed each parser, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("parsers", nargs="*")
    parser.add_argument("--inputs", type=int, default=2_000_000, help="inputs for all parsers together")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this page")
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    atheris: Any = import_module("atheris")

    # atheris prints the name of each module.
    with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["ratelimits"]):
        import django

        django.setup()
        from tests.fuzz.targets import TARGETS

    targets = [target for target in TARGETS if not arguments.parsers or target.name in arguments.parsers]
    each = -(-arguments.inputs // len(targets))
    results = []
    for target in targets:
        folder = Path(tempfile.mkdtemp(prefix="ratelimits-fuzz-"))
        result = _result(atheris, target, each, folder)
        results.append(result)
        failed = result.broken or result.crashes or result.hangs
        print("{:32} {:>12} inputs {:>3} crashes {:>3} hangs {:>8} s".format(*result.cells()), flush=True)
        if failed:
            print(f"see {folder}\n{(folder / 'log').read_text(errors='replace')[-3000:]}", flush=True)
    total = Result("all", *(sum(column) for column in list(zip(*results, strict=True))[1:]))
    print("{:32} {:>12} inputs {:>3} crashes {:>3} hangs {:>8} s".format(*total.cells()))
    if arguments.write:
        heads = ("parser", "inputs", "crashes", "hangs", "seconds")
        page_tables.write(arguments.write, "fuzz", heads, [result.cells() for result in (*results, total)])
    return 1 if total.broken or total.crashes or total.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
