"""Test that an erasure that ends at any step is made wholly or not at all, files included."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimits.usage.erasure.erase import archives_in, erase
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.erase import NotErasedError
from tests.support.reports.searched import found
from tests.support.selection import few
from tests.support.usage.traffic import at
from tests.usage.erasure import books
from tests.usage.erasure.books import NAMES, manifests
from tests.usage.erasure.conftest import Findings
from tests.usage.erasure.test_erase import MONTHS, in_files, sums

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("step", few(crash.ERASE_STEPS, "erase:reports-written", "erase:committed"))
def test_an_erasure_that_ends_at_any_step_is_made_wholly_or_not_at_all(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: Findings
) -> None:
    erased = books.write(joined=True)
    given = manifests(*MONTHS)
    list(archive.prune("default", at("2026-11-01") // 10**6, tmp_path))
    before, named = sums(), found(NAMES)

    def die(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(crash, "reached", die)
        with pytest.raises(KeyboardInterrupt):
            erase(erased, archives_in([tmp_path]))
    made = step in ("erase:committed", "erase:files-deleted")
    assert found(NAMES) == ([] if made else named)
    recorded = [path for path in archive.files(tmp_path) if _is_recorded(path)]
    assert findings(given, *recorded) == []
    if made:
        with pytest.raises(NotErasedError, match="erased before"):
            erase(erased, archives_in([tmp_path]))
    else:
        erase(erased, archives_in([tmp_path]))
    assert found(NAMES) == []
    assert in_files(tmp_path) == []
    assert findings(given, *archive.files(tmp_path)) == []
    assert sums() == before


def _is_recorded(path: Path) -> bool:
    try:
        archive.check("default", path)
    except archive.ArchiveError:
        return False
    return True
