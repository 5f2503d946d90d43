"""Verify the ledger, the reports and the delivery ledger, for the command `ratelimits_verify`.

The delivery ledger is the table of what was pushed to billing systems. The result also says what was checked, and what
could not be checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from django.db.models import QuerySet

from ratelimits.billing.models import PushDelivery, Report, ReportLine
from ratelimits.billing.push.verify import verify_pushed
from ratelimits.billing.reports.verify.configuration import count_without_history, verify_configuration
from ratelimits.billing.reports.verify.early import verify_early
from ratelimits.billing.reports.verify.manifest import compare
from ratelimits.billing.reports.verify.manifest_history import digests_without_history
from ratelimits.billing.reports.verify.printed import verify_printed
from ratelimits.billing.reports.verify.report import ReportVerifier
from ratelimits.billing.reports.verify.terms import verify_terms
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.conf import conf
from ratelimits.models.accounts.named import named_now
from ratelimits.progress import Progress
from ratelimits.usage import signatures
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.archive import ArchiveError
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.ledger.verify.states import verify_archives
from ratelimits.usage.ledger.verify.watermarks import verify_watermarks
from ratelimits.usage.models import ArchivedRange, Line, PeriodUsage
from ratelimits.usage.models.erased import wrong_notes
from ratelimits.usage.periods import checked_month

#: The kinds of things that are checked, each with its singular. The summary names their numbers in this order.
_KINDS = {
    "reports": "report",
    "report lines": "report line",
    "shards": "shard",
    "batches": "batch",
    "ledger lines": "ledger line",
    "links of the chains": "link of the chains",
    "totals": "total",
    "ends of reports": "end of a report",
    "adjustments": "adjustment",
    "printed gaps": "printed gap",
    "archives": "archive",
    "archived ranges": "archived range",
    "manifests": "manifest",
    "watermarks": "watermark",
    "heads of chains": "head of a chain",
    "entries of manifests": "entry of a manifest",
    "billing periods": "billing period",
    "rows of the configuration": "row of the configuration",
    "deliveries": "delivery",
}


class Verification:
    """One verification of the ledger and the reports.

    `month` (such as "2026-11") chooses the reports of one month. `account` chooses the reports of the customer whom it
    names now. With `account`, the ledger itself is not verified. `archives` are archive files. `manifests` are results
    of `manifest.parse`. `checked` has the number of checked things, by kind. `progress` shows how much of each long
    stage is done.
    """

    def __init__(
        self,
        *,
        account: str | None = None,
        month: str | None = None,
        archives: Sequence[Path] = (),
        manifests: Sequence[dict[str, Any]] = (),
        progress: Progress | None = None,
    ) -> None:
        self._account, self._manifests = account, manifests
        self._month = None if month is None else checked_month(month)
        self._using = conf.DATABASE
        recorded = set(ArchivedRange.objects.using(self._using).order_by().values_list("archive", flat=True))
        self._archives = [path for path in archives if path.name in recorded]
        self._unknown_archives = [path for path in archives if path.name not in recorded]
        self._missing_archives = sorted(recorded - {path.name for path in self._archives})
        self._redis_errors: list[str] = []
        self._progress = progress
        self.checked: Counter[str] = Counter()

    def findings(self) -> Generator[str]:
        """Yield a sentence for each error.

        Database cursors stay open between two findings. So a caller that stops early must close this generator. Raise
        ArchiveError if the digest of an archive file is not the digest that the ledger recorded.
        """
        using = self._using
        with ExitStack() as stack:
            sources = [using]
            if self._archives:
                archive_alias = stack.enter_context(archive.opened(using, self._archives))
                self.checked["archives"] += len(self._archives)
                findings = verify_ledger(archive_alias, archive=True, checked=self.checked)
                yield from self._stage("ledger lines", Line.objects.using(archive_alias), findings)
                names = {path.name for path in self._archives}
                yield from verify_archives(using, archive_alias, names, self.checked)
                sources.append(archive_alias)
            for name, part in self._parts(using, sources):
                yield from _guarded(name, part)

    def _parts(self, using: str, sources: list[str]) -> Iterator[tuple[str, Iterable[str]]]:
        """Yield the name of each part of the verification, with an iterator over its findings."""
        checked = self.checked
        if self._account is None:
            findings: Iterator[str] = verify_ledger(using, checked=checked)
            yield "the ledger", self._stage("ledger lines", Line.objects.using(using), findings)
            yield "erased names", wrong_notes(using)
            yield "the watermarks", verify_watermarks(using, checked=checked, redis_errors=self._redis_errors)
            yield "early closings", verify_early(using, *sources)
            findings = verify_totals(using, *sources, checked=checked)
            yield "the totals", self._stage("totals", PeriodUsage.objects.using(using), findings)
            yield "adjustments and gaps", verify_printed(using, checked=checked)
            yield "the configuration", verify_configuration(using, checked)
            yield "the terms of reports", verify_terms(using, checked)
            findings = verify_pushed(using, checked)
            yield "the delivery ledger", self._stage("deliveries", PushDelivery.objects.using(using), findings)
        read_digests = cache(lambda: digests_without_history(using))
        for manifest in self._manifests:
            checked["manifests"] += 1
            findings = compare(
                using,
                manifest,
                *sources,
                checked=checked,
                digests_without_history=read_digests,
                progress=self._progress,
            )
            yield f"the manifest of {manifest['month']}", findings
        findings = self._verify_reports(ReportVerifier(using, *sources, checked=checked))
        lines = ReportLine.objects.using(using).filter(report__in=self._chosen_reports())
        yield "the reports", self._stage("report lines", lines, findings)

    def _stage(self, kind: str, rows: QuerySet[Any], findings: Iterable[str]) -> Iterator[str]:
        """Yield the findings about these rows, and show how many rows were checked. `kind` is the name of the rows."""
        if self._progress is not None:
            before = self.checked[kind]
            self._progress.begin(kind, rows.count(), lambda: self.checked[kind] - before)
        yield from findings

    def _verify_reports(self, verifier: ReportVerifier) -> Iterator[str]:
        for report in self._reports():
            yield from verifier.findings(report)

    def _chosen_reports(self) -> QuerySet[Report]:
        """Return the reports to verify."""
        reports = Report.objects.using(self._using)
        if self._account is not None:
            reports = reports.filter(customer__token=named_now(self._using, [self._account])[self._account].token)
        if self._month is not None:
            reports = reports.filter(label=self._month)
        return reports

    def _reports(self) -> Iterator[Report]:
        yield from (
            self._chosen_reports().select_related("customer").order_by("account", "period_start", "version").iterator()
        )

    def summary(self) -> str:
        """Return a sentence with the numbers of things that were checked."""
        counts = [
            f"{count:,} {singular if count == 1 else kind}"
            for kind, singular in _KINDS.items()
            if (count := self.checked[kind])
        ]
        return f"Checked {', '.join(counts) or 'nothing: there is no usage and no report yet'}."

    def unchecked(self) -> Iterator[str]:
        """Yield a sentence for each thing that could not be checked."""
        if self._account is not None:
            yield (
                "With --account only the reports of that account are checked. These are not checked: the ledger's"
                " chains, the totals of usage, adjustments and gaps, the history of terms and prices, and what was"
                " pushed."
            )
        for error in self._redis_errors[:1]:
            yield f"It is not checked whether Redis still has batches from before a watermark, since {error}."
        if self._month is not None:
            yield f"Only reports of {self._month} are computed again."
        if not signatures.has_key():
            yield (
                "Without SIGNING_KEY nobody can see whether a chain, a report or a manifest was changed together with"
                " its digest."
            )
        elif "" in conf.SIGNING_KEYS_OLD:
            yield 'With "" in SIGNING_KEYS_OLD nobody can see whether signatures were removed.'
        if names := self._missing_archives:
            yield (
                f"Archives with usage that were not given (--archive DIRECTORY): {len(names)}"
                f" ({', '.join(names[:3])}{', …' if names[3:] else ''}). Their lines are not compared. For their"
                " shards, this check may not find a total of usage that is too large."
            )
        for path in self._unknown_archives:
            yield f"{path} was not read: the ledger has no record of this archive, or the archive was restored."
        if not self._manifests:
            yield (
                "Without a manifest (--manifest FILE) nobody can see these changes: reports that were deleted with"
                " everything that refers to them; totals of processes that were changed or deleted; changes to gaps,"
                " reasons of adjustments, quarantined batches, the history of terms and prices, and what was pushed and"
                " accepted; and usage that is not in a report yet and was changed together with its digests."
            )
        if self._account is None and (count := count_without_history(self._using)):
            yield (
                f"Rows of the configuration without a history: {count}. Nobody can see whether they were changed."
                " ratelimits_reload gives them a history."
            )
        for manifest in self._manifests:
            yield from _unchecked_with(manifest)


def _unchecked_with(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each thing that could not be checked with a manifest."""
    month = manifest["month"]
    if manifest["open"]:
        first = ", ".join(map(str, manifest["open"][:3]))
        yield (
            f"Periods that were open when the manifest of {month} was written: {len(manifest['open'])}"
            f" ({first}{', …' if manifest['open'][3:] else ''}). Write another manifest after these periods are closed."
        )


def _guarded(name: str, findings: Iterable[str]) -> Generator[str]:
    """Yield the findings of one part. If the part raises an exception, yield a finding that says so.

    In a table that was tampered with, any value can cause an exception. The other parts must still be verified.
    """
    try:
        yield from findings
    except ArchiveError:
        raise
    except Exception as error:  # noqa: BLE001
        yield f"{name} cannot be verified completely: {error!r}"
