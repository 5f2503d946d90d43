"""Verifying everything that is asked for: the ledger, reports and what was pushed of them.

Says what was checked, and what could not be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import ArchivedRange, Report
from ratelimits.push.verify import verify_pushed
from ratelimits.reports.periods import month_window, starts_in
from ratelimits.reports.verify.configuration import count_without_history, verify_configuration
from ratelimits.reports.verify.early import verify_early
from ratelimits.reports.verify.manifest import compare
from ratelimits.reports.verify.manifest_sections import without_history
from ratelimits.reports.verify.printed import verify_printed
from ratelimits.reports.verify.report import ReportVerifier
from ratelimits.reports.verify.terms import verify_terms
from ratelimits.reports.verify.totals import verify_totals
from ratelimits.usage.retention import archive
from ratelimits.usage.retention.archive import ArchiveError
from ratelimits.usage.verify.heads import verify_archives
from ratelimits.usage.verify.ledger import verify_ledger
from ratelimits.usage.verify.watermarks import verify_watermarks

#: What is counted, in the order in which it is told.
_KINDS = (
    *("reports", "report lines", "shards", "batches", "ledger lines", "links of the chains", "totals"),
    *("ends of reports", "adjustments", "printed gaps", "archives", "archived ranges", "manifests"),
    *(
        "watermarks",
        "heads of chains",
        "entries of manifests",
        "bounds of reports",
        "rows of the configuration",
        "deliveries",
    ),
)


class Verification:
    """One verification of the ledger and of reports: of one account or all, of one month (like "2026-11") or all.

    `archives` are files of archived usage, `manifests` what `manifest.parse` returned. `checked` counts, by kind, what
    was checked so far.
    """

    def __init__(
        self,
        *,
        account: str | None = None,
        month: str | None = None,
        archives: Sequence[Path] = (),
        manifests: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._account, self._month, self._manifests = account, month, manifests
        self._window = None if month is None else month_window(month)
        self._using = conf.DATABASE
        known = set(ArchivedRange.objects.using(self._using).order_by().values_list("archive", flat=True))
        self._archives = [path for path in archives if path.name in known]
        self._strangers = [path for path in archives if path.name not in known]
        self._away = sorted(known - {path.name for path in self._archives})
        self._unasked: list[str] = []
        self.checked: Counter[str] = Counter()

    def findings(self) -> Generator[str]:
        """Yield a sentence for each thing that does not hold; nothing if all holds.

        Cursors are open between findings: whoever stops before the end closes it. Raises ArchiveError for a file that
        is not the archive whose name it has.
        """
        using = self._using
        with ExitStack() as stack:
            sources = [using]
            if self._archives:
                moved = stack.enter_context(archive.opened(using, self._archives))
                self.checked["archives"] += len(self._archives)
                yield from verify_ledger(moved, archive=True, checked=self.checked)
                yield from verify_archives(using, moved, {path.name for path in self._archives}, self.checked)
                sources.append(moved)
            for what, found in self._parts(using, sources):
                yield from _told(what, found)

    def _parts(self, using: str, sources: list[str]) -> Iterator[tuple[str, Iterable[str]]]:
        """Yield what is verified, each part with its findings, which are looked for as they are read."""
        checked = self.checked
        if self._account is None:
            yield "the ledger", verify_ledger(using, checked=checked)
            yield "the watermarks", verify_watermarks(using, checked=checked, unasked=self._unasked)
            yield "early closings", verify_early(using, *sources)
            yield "the totals", verify_totals(using, *sources, checked=checked)
            yield "adjustments and gaps", verify_printed(using, checked=checked)
            yield "the configuration", verify_configuration(using, checked)
            yield "the terms of reports", verify_terms(using, checked)
            yield "the delivery ledger", verify_pushed(using, checked)
        rows = cache(lambda: without_history(using))
        for manifest in self._manifests:
            checked["manifests"] += 1
            found = compare(using, manifest, *sources, checked=checked, without_history=rows)
            yield f"the manifest of {manifest['month']}", found
        yield "the reports", self._verify_reports(ReportVerifier(using, *sources, checked=checked))

    def _verify_reports(self, verifier: ReportVerifier) -> Iterator[str]:
        for report in self._reports():
            yield from verifier.findings(report)

    def _reports(self) -> Iterator[Report]:
        reports = Report.objects.using(self._using).order_by("account", "period_start", "version")
        if self._account is not None:
            reports = reports.filter(account=self._account)
        if self._window is not None:
            reports = reports.filter(period_start__gte=self._window[0], period_start__lt=self._window[1])
        for report in reports.iterator():
            if self._month is None or starts_in(self._month, report.period_start, report.timezone):
                yield report

    def summary(self) -> str:
        """Return what was checked, and how much of it, as a sentence."""
        found = [f"{self.checked[kind]:,} {kind}" for kind in _KINDS if self.checked[kind]]
        return f"Checked {', '.join(found) or 'nothing: there is no usage and no report yet'}."

    def unseen(self) -> Iterator[str]:
        """Yield a sentence for each reason why something could not be seen."""
        if self._account is not None:
            yield (
                "With --account only the reports of that account are checked: not the ledger's chains, the running"
                " totals, adjustments and gaps, the history of terms and prices, and what was pushed."
            )
        for why in self._unasked[:1]:
            yield (
                f"Redis could not be asked what waits there ({why}), so nobody can see a watermark that was moved past"
                " it."
            )
        if self._month is not None:
            yield f"Only reports of {self._month} are made again."
        if not signatures.checked():
            yield (
                "Without SIGNING_KEY nobody can see a chain, a report or a manifest that was changed and then digested"
                " anew."
            )
        elif "" in conf.SIGNING_KEYS_OLD:
            yield 'With "" in SIGNING_KEYS_OLD nobody can see signatures that were taken away.'
        if self._away:
            yield (
                f"Usage was moved to {len(self._away)} archives that are not at hand (--archive DIRECTORY):"
                f" {', '.join(self._away[:3])}{', …' if self._away[3:] else ''}. Their lines and what was archived"
                " are not compared, running totals of their shards only for being too small."
            )
        for path in self._strangers:
            yield f"{path} was not read: the ledger knows of no archive {path.name}, or has it back."
        if not self._manifests:
            yield (
                "Without a manifest (--manifest FILE) nobody can see: reports that were deleted with all that points at"
                " them, changes to totals of processes, gaps, reasons of adjustments and quarantined batches, to the"
                " history of terms and prices, to what was pushed and accepted, and usage that is in no report yet and"
                " was digested anew."
            )
        if self._account is None and (count := count_without_history(self._using)):
            yield (
                f"{count} rows of the configuration have no history, so nobody can see whether they were changed:"
                " ratelimits_reload gives them one."
            )
        for manifest in self._manifests:
            if manifest["open"]:
                first = ", ".join(map(str, manifest["open"][:3]))
                yield (
                    f"The manifest of {manifest['month']} was written while {len(manifest['open'])} periods were open"
                    f" ({first}{', …' if manifest['open'][3:] else ''}): write a further one once they are closed."
                )


def _told(what: str, findings: Iterable[str]) -> Generator[str]:
    """Yield the findings of a part. What it cannot go on with is a finding too, and the other parts are still verified:
    whoever writes to the tables can write values that bring any error about.
    """
    try:
        yield from findings
    except ArchiveError:
        raise
    except Exception as error:  # noqa: BLE001
        yield f"{what} cannot be verified to the end: {error!r}"
