"""Write the results of a run: tables for the terminal, JSON for the documentation, and charts as SVG."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import redis

PACKAGES = ("ratelimits", "Django", "djangorestframework", "django-redis", "redis", "hiredis")


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise or a target: a measured number is at most `bound`. With `least`, it is at least `bound`."""

    text: str
    bound: float
    measured: float
    least: bool = False

    @property
    def holds(self) -> bool:
        return self.measured >= self.bound if self.least else self.measured <= self.bound

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.text,
            "bound": ("≥ " if self.least else "≤ ") + f"{self.bound:,g}",
            "measured": round(self.measured, 3),
            "holds": self.holds,
        }


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def load() -> list[float]:
    """Return the machine's load averages."""
    return [round(one, 2) for one in os.getloadavg()]


def machine(url: str, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Return facts about the machine of a run. Its load averages show whether other work has made the numbers worse."""
    with redis.Redis.from_url(url) as client:
        info = client.info("server")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "server": f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}",
        "load": load(),
        "packages": {name: found for name in (*PACKAGES, *packages) if (found := version(name))},
    }


def run_json(
    benchmark: str,
    machine_info: dict[str, Any],
    options: dict[str, Any],
    claims: Sequence[Claim],
    targets: Sequence[Claim] = (),
    **results: Any,
) -> dict[str, Any]:
    """Return a run as JSON data. `claims` are promises. `targets` are aims that may be missed."""
    used = {name: value for name, value in options.items() if name != "out"}
    return {
        "benchmark": benchmark,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_info,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in used.items()},
        "claims": [claim.to_json() for claim in claims],
        "targets": [target.to_json() for target in targets],
        **results,
    }


def cell_text(value: Any) -> str:
    """Return a table cell as text. Numbers have commas between thousands.

    A float has two decimals if it is below 10, one decimal if it is below 100, and otherwise none. 0.0 is shown as "0".
    """
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if value == 0 or abs(value) >= 100:
            return f"{value:,.0f}"
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned table: the first column to the left, all others to the right."""
    cells = [list(columns), *([cell_text(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    lines = [
        "  ".join(
            [cell.ljust(widths[0]) if index == 0 else cell.rjust(widths[index]) for index, cell in enumerate(row)]
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *([cell_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def claims_table(claims: Sequence[dict[str, Any]], kind: str = "promise") -> str:
    """Return the table of promises (or targets) and measured values."""
    rows = [(one["claim"], one["bound"], float(one["measured"]), one["holds"]) for one in claims]
    return table((kind, "bound", "measured", "holds"), rows)


def write(run: dict[str, Any], out: Path | None, charts: dict[str, str] | None = None) -> None:
    """Write the run's JSON and its charts (name -> SVG) into the directory `out`. Do nothing if `out` is None."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{run['benchmark']}.json").write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    for name, svg in (charts or {}).items():
        (out / f"{name}.svg").write_text(svg)


_COLOURS = {"floor": "#9aa5b1", "ours": "#2563eb", "peer": "#d97706"}
_FONT = 'font-family="system-ui, sans-serif" font-size="13"'
#: Pixels of a chart: height of a row, whole width, and the space for the labels, for the title and for the values.
_ROW, _WIDTH, _LEFT, _TOP, _RIGHT = 24, 900, 360, 56, 70


def bar_chart(title: str, unit: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Return horizontal bars as SVG. A bar has a label, a value and a kind: floor, ours or peer (see timing.Case)."""
    most = max(value for _label, value, _kind in bars)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(bars) + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" {_FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="16" font-weight="600" fill="#111827">{escape(title)}</text>',
        f'<text x="12" y="42" fill="#4b5563">{escape(unit)}</text>',
    ]
    for number, (label, value, kind) in enumerate(bars):
        y = _TOP + number * _ROW
        width = max(value * scale, 1)
        out += [
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end" fill="#111827">{escape(label)}</text>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" fill="{_COLOURS[kind]}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}" fill="#111827">{cell_text(float(value))}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"
