from __future__ import annotations

import io

import pytest
from django.core.management import call_command

from ratelimits.management.help import ExplainedCommand
from ratelimits.management.table import table


def test_texts_are_at_the_left_and_numbers_at_the_right() -> None:
    lines = list(table(("name", "used"), [("acme", 1234), ("a", 5)]))
    assert lines == ["name   used", "acme  1,234", "a         5"]


def test_rows_after_the_measured_ones_are_written_too() -> None:
    assert len(list(table(("n",), ((n,) for n in range(1000))))) == 1001


def test_control_characters_are_escaped() -> None:
    assert list(table(("name",), [("a\x1b[2Jb",)]))[1] == "a\\x1b[2Jb"


class Coloured(ExplainedCommand):
    requires_system_checks = ()

    def handle(self, *args: object, **options: object) -> str:
        return self.style.ERROR("red")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_turns_colours_off(no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("DJANGO_COLORS", "dark")
    out = io.StringIO()
    call_command(Coloured(stdout=out, force_color=True), stdout=out)
    assert ("\x1b[" in out.getvalue()) is coloured
    assert "red" in out.getvalue()
