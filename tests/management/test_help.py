from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout

import pytest
from django.core.management import call_command, get_commands, load_command_class

from ratelimits.management.help import ExplainedCommand

NAMES = sorted(name for name, app in get_commands().items() if app == "ratelimits")


def command(name: str) -> ExplainedCommand:
    found = load_command_class("ratelimits", name)
    assert isinstance(found, ExplainedCommand)
    return found


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
def test_a_sentence_that_is_no_error_is_not_red() -> None:
    out, err = io.StringIO(), io.StringIO()
    call_command("ratelimits_verify", stdout=out, stderr=err, force_color=True)
    assert "\x1b[32;1mNo errors were found." in out.getvalue()
    assert [line for line in err.getvalue().splitlines() if line.startswith("Checked ")]
