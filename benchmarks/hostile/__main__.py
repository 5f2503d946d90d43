"""Measure how long the readers of outside texts need for hostile texts of 200 and of 8,000 characters.

    python -m benchmarks.hostile [--length 200 8000] [--only WORDS] [--out DIR]

A regular expression, a number or the JSON of a client can need a time that grows with the square of its length, or
faster. Meanwhile no other thread of the process runs. Each reader gets its valid texts with something repeated before
them, in them and after them. The processor time of a reading is measured. If it is longer than the bound, the reading
is repeated a few times, and the shortest time counts, because other processes can only make it longer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support import report, servers

if TYPE_CHECKING:
    from benchmarks.hostile.readers import TextReader

#: Longest time in ms that one text may take.
BOUND = 5.0
#: After a text that takes longer than this, in ms, the reader gets no more texts.
HOPELESS = 10 * BOUND
#: Maximum number of times that a text is read.
READINGS = 4
#: What is repeated in the texts: characters that patterns repeat, parts of texts that are read, brackets of JSON,
#: digits of other scripts, and marks that Unicode must sort.
REPEATED = (
    *"9 0a-+.,:;/|=%_&'\"\\[({<#@\t\n\0\u00df\u0663\u5b57\ufdfa\U0001f600",
    *(
        "1a",
        "1 a ",
        "1 d ",
        "9d",
        "1.",
        "00",
        "-1",
        "e9",
        ", ",
        " ,",
        ": ",
        "::",
        "a:",
        "::1",
        "1.1.1.1,",
        "10.0.0.1, ",
    ),
    *(
        "\u0323\u0301",
        "\u0301\u0323",
        "e\u0301",
        "ſ",
        "İ",
        "\r\n",
        "''",
        '""',
        " '",
        ';"',
        '{"a":',
        "[1,",
        '"a",',
        "user:1 ",
    ),
    *("requests ", "per ", "1 month ", "A,", ":A", "x_", "=a", "|lower", "\\t", "2026-", "T00", "ip:", "%s", "\u2028"),
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[200, 8_000], help="characters of the texts")
    parser.add_argument("--only", default="", help="measure only the readers whose name contains this")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    with servers.redis_server(None) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database))
        run = measure(options, redis_server)
    print(text_of(run))
    report.write(run, options.out)
    return 0 if all(claim["holds"] for claim in run["claims"]) else 1


def texts(valid: Sequence[str], length: int) -> Iterator[str]:
    """Yield the hostile texts of this length that are made from the valid texts."""
    for part in REPEATED:
        repeated = (part * (length // len(part) + 1))[:length]
        yield repeated
        for text in valid:
            half = len(text) // 2
            begin, middle, end = repeated[len(text) :], text[:half], text[half:]
            yield from (begin + text, text + begin, middle + begin + end, f"{text[:-1]}{begin}!")
    for text in valid:
        yield (text * (length // len(text) + 1))[:length]
        for letter in dict.fromkeys(text):
            yield text.replace(letter, letter * (length // max(text.count(letter), 1)))[: length + len(text)]


def milliseconds(reader: TextReader, text: str) -> float:
    """Return the processor time of one reading, in ms. Return the shortest time if the first one is above BOUND."""
    from benchmarks.hostile.readers import REFUSED

    times = []
    for _reading in range(READINGS):
        started = time.thread_time_ns()
        with suppress(*REFUSED):
            reader.read(text)
        times.append((time.thread_time_ns() - started) / 1e6)
        if times[-1] <= BOUND:
            break
    return min(times)


def measure(options: argparse.Namespace, redis_server: Any) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.hostile import readers

    machine_info = report.machine(redis_server.url)
    rows = []
    for reader in readers.readers():
        if options.only not in reader.name:
            continue
        for text in reader.valid:
            milliseconds(reader, text)  # so that everything is loaded
        for length in options.length:
            worst, slowest_text = 0.0, ""
            for text in dict.fromkeys(texts(reader.valid, length)):
                needed = milliseconds(reader, text)
                if needed > worst:
                    worst, slowest_text = needed, text
                if worst > HOPELESS:
                    break
            rows.append({"reader": reader.name, "length": length, "ms": round(worst, 3), "text": slowest_text[:60]})
    claims = [
        report.Claim(
            f"longest reading of {length:,} characters, ms",
            BOUND,
            max((row["ms"] for row in rows if row["length"] == length), default=0.0),
        )
        for length in options.length
    ]
    return report.run_json(
        "hostile", {**machine_info, "load_after": report.load()}, vars(options), claims, readers=rows
    )


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables, the slowest readers first."""
    rows = [
        (row["reader"], row["length"], row["ms"], repr(row["text"]))
        for row in sorted(run["readers"], key=lambda row: -row["ms"])
    ]
    columns = ("reader of hostile texts", "characters", "longest ms", "begin of the text")
    return "\n\n".join([report.table(columns, rows), report.claims_table(run["claims"])])


if __name__ == "__main__":
    sys.exit(main())
