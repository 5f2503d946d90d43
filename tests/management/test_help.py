from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connection, transaction
from django.db.models import Model

from ratelimits.billing.models import Report
from ratelimits.management.help import ExplainedCommand
from ratelimits.models import Rule
from ratelimits.models.versions import ConfigVersion
from tests.support.own_apps import OWN

APPS = {name: app for name, app in get_commands().items() if app in OWN}
NAMES = sorted(APPS)


def command(name: str) -> ExplainedCommand:
    found = load_command_class(APPS[name], name)
    assert isinstance(found, ExplainedCommand)
    return found


def test_the_page_of_exports_lists_every_option_and_format_of_the_report() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "exports" / "index.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)`", page, re.MULTILINE)
    parser = command("ratelimits_report").create_parser("manage.py", "ratelimits_report")
    django = BaseCommand().create_parser("manage.py", "any")
    options = {*parser._option_string_actions} - {*django._option_string_actions}
    (formats,) = (action.choices for action in parser._actions if action.dest == "format")
    assert {*listed} == {*options, *(formats or ())}


@pytest.mark.parametrize("name", NAMES)
def test_help_ends_with_examples_and_exit_codes(name: str) -> None:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit):
        command(name).create_parser("manage.py", name).parse_args(["--help"])
    shown = out.getvalue()
    examples, codes = shown.index("examples:\n  manage.py"), shown.index("exit status:\n  0  ")
    assert examples < codes
    for code in command(name).exit_codes:
        assert f"\n  {code}  " in shown[codes:]


def renamed(model: type[Model], name: str) -> None:
    """Rename a model's table until the test's transaction is rolled back."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {model._meta.db_table} RENAME TO {name}")


def examples() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        for arguments in command(name).examples:
            yield name, arguments


@pytest.mark.parametrize(("name", "arguments"), list(examples()))
def test_each_example_has_valid_arguments(name: str, arguments: str) -> None:
    parser = command(name).create_parser("manage.py", name)
    parser.exit_on_error = False
    assert parser.parse_args(shlex.split(arguments)).verbosity == 1


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["ratelimits_report --period 2026-11", "ratelimits_rules dump", "ratelimits_reload"])
def test_without_its_tables_a_command_says_in_one_sentence_to_migrate(name: str) -> None:
    missing = {"ratelimits_report": Report, "ratelimits_rules": Rule, "ratelimits_reload": ConfigVersion}
    model = missing[name.split()[0]]
    renamed(model, "gone")
    said = f"The table {model._meta.db_table} is missing: run `manage.py migrate`."
    with pytest.raises(CommandError, match=f"^{re.escape(said)}$"), transaction.atomic():
        call_command(*name.split(), stdout=io.StringIO())


@pytest.mark.django_db
@pytest.mark.parametrize("sql", ["SELECT 1 FROM ratelimits_nothing", "SELECT nothing FROM ratelimits_rule", "SELECT ("])
def test_every_other_error_of_the_database_stays_as_it_is(sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that belongs to no model, a missing column, wrong SQL: `migrate` would not help."""

    def handle(*args: object, **options: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    wrong = command("ratelimits_seal")
    monkeypatch.setattr(wrong, "handle", handle)
    with pytest.raises(DatabaseError), transaction.atomic():
        call_command(wrong)


@pytest.mark.django_db
def test_a_sentence_that_is_no_error_is_not_red() -> None:
    out, err = io.StringIO(), io.StringIO()
    call_command("ratelimits_verify", stdout=out, stderr=err, force_color=True)
    assert "\x1b[32;1mNo errors were found." in out.getvalue()
    assert [line for line in err.getvalue().splitlines() if line.startswith("Checked ")]
