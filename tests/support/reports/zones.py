"""Install other time zone data, as a new version of the package tzdata would."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ratelimits.algorithms import billing_periods, calendar


class NewZones:
    """Data of some zones in which each zone of `changed` is as another zone is today."""

    def __init__(self, zones: Iterable[str], changed: Mapping[str, str]) -> None:
        self._zones, self._changed, self._today = [*zones], changed, calendar._DATA
        self._directory: Path | None = None

    def install(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ratelimits-zones-"))
        for name in self._zones:
            file = self._directory / "zoneinfo" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes((self._today / "zoneinfo" / self._changed.get(name, name)).read_bytes())
        self._use(self._directory)

    def restore(self) -> None:
        """Install the data of today again."""
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None
            self._use(self._today)

    @staticmethod
    def _use(data: object) -> None:
        calendar._DATA = data  # type: ignore[assignment]
        # A process reads new data when it starts.
        for cached in (calendar._read, billing_periods.valid_terms, billing_periods._starts_at_quarters):
            cached.cache_clear()
