from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ratelimits.checks.installation import check_distribution


def test_no_other_distribution_is_installed_here() -> None:
    assert check_distribution(None) == []


def test_the_strangers_distribution_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "ratelimits-0.1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ratelimits\nVersion: 0.1.5\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (error,) = check_distribution(None)
    assert error.id == "ratelimits.E010"
    assert "'ratelimits' 0.1.5" in error.msg
    assert "pip install django-ratelimits" in str(error.hint)
