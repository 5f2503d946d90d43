"""Show that each test of docs/security.md fails without its defence: `python -m tests.long.threats`.

For each defence this file names the function, a text in it, and the text with which the defence is gone. The command
runs the test of each defence with the changed function. It prints a line for each, and ends with status 1 if a test
still passes.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import pytest

from tests.long.planting import ROOT, changed

PAGE = ROOT / "docs" / "security.md"


class Defence(NamedTuple):
    """A line of code that stops a threat.

    test      the test that fails without this line, as the page names it
    function  the module and the name of the function with the line
    line      a text that occurs once in the function
    instead   the text that replaces it
    """

    test: str
    function: str
    line: str
    instead: str


DEFENCES = (
    Defence(
        "tests/throttling/test_by_rules.py::TestWho::test_a_forged_header_opens_no_door",
        "ratelimits.addresses:address_of",
        "trusted := proxies()",
        "trusted := proxies() or 1",
    ),
    Defence(
        "tests/test_addresses.py::test_a_header_counts_if_a_trusted_proxy_sends_it",
        "ratelimits.addresses:_from_trusted_proxy",
        " or not _is_trusted(remote[:LONGEST_ADDRESS], trusted_proxies)",
        "",
    ),
    Defence(
        "tests/test_addresses.py::test_an_address_is_a_network",
        "ratelimits.addresses:_address_key",
        "int(address) & _NETWORK_BITS",
        "int(address)",
    ),
    Defence(
        "tests/rules/test_access.py::test_a_block_finds_its_address_in_each_form",
        "ratelimits.addresses:read_address",
        "ipv4_in(address, tunnels=tunnels) or address",
        "address",
    ),
    Defence(
        "tests/test_addresses.py::test_the_networks_of_proxies_are_read_as_addresses_are",
        "ratelimits.addresses:_is_trusted",
        "read_address(text, tunnels=False)",
        "read_address(text)",
    ),
    Defence(
        "tests/test_alike.py::test_texts_that_a_view_reads_as_one_value_have_one_count",
        "ratelimits.models.fields.view_key_texts:normal_value",
        "_normal(text)",
        "text",
    ),
    Defence(
        "tests/engine/test_keys.py::test_a_text_in_a_usage_field_holds_no_separator",
        "ratelimits.engine.keys:_quote",
        'quote(ledger_name(text), safe=":@.-_~")',
        "ledger_name(text)",
    ),
    Defence(
        "tests/engine/test_keys.py::TestLongNames::test_two_long_names_are_two",
        "ratelimits.engine.keys:_digest",
        "hashlib.blake2b(text.encode(",
        "hashlib.blake2b(text[:100].encode(",
    ),
    Defence(
        "tests/test_alike.py::test_the_value_itself_is_stored_nowhere",
        "ratelimits.models.fields.view_key_texts:name_of",
        """{_digest(f'{source.text}={value}', 12)}""",
        "{value}",
    ),
    Defence(
        "tests/quota/test_checking.py::TestHotPath::test_what_is_remembered_of_requests_is_bounded",
        "ratelimits.quota.prepared:PreparedCommands.make",
        "self.by_key.clear()",
        "pass",
    ),
    Defence(
        "tests/quota/test_meters.py::TestMemory::test_thousands_of_names_are_refused_and_kept_nowhere",
        "ratelimits.quota.costs:_refused_meter",
        "return new[0]",
        "return None",
    ),
    Defence(
        "tests/engine/test_script_bounds.py::test_a_thousand_waiting_counts_are_sent_in_bounded_commands",
        "ratelimits.engine.counting:in_bounds",
        "> MAX_COUNTERS",
        "> 10**9",
    ),
    Defence(
        "tests/algorithms/test_typed_rates.py::test_a_long_text_is_refused_at_once",
        "ratelimits.algorithms.typed_rates:_plain",
        ' if len(plain) <= MAX_TEXT else ""',
        "",
    ),
    Defence(
        "tests/quota/test_shortage.py::test_a_flood_of_addresses_leaves_no_request_undecided",
        "ratelimits.quota.shortage:coarser",
        "identity.address is not None and not",
        "False and not",
    ),
    Defence(
        "tests/test_addresses.py::test_what_is_remembered_of_texts_that_clients_choose_is_small",
        "ratelimits.addresses:address_key",
        " if len(text) <= LONGEST_ADDRESS else None",
        "",
    ),
    Defence(
        "tests/answers/test_headers.py::test_a_name_is_a_quoted_string",
        "ratelimits.answers.headers:quoted",
        "value = _UNPRINTABLE.sub(",
        "(",
    ),
    Defence(
        "tests/billing/reports/exports/test_csv.py::test_a_text_that_looks_like_a_formula_gets_an_apostrophe",
        "ratelimits.files:csv_lines",
        "neutral(values[index])",
        "values[index]",
    ),
    Defence(
        "tests/billing/reports/exports/test_xlsx.py::test_nothing_in_the_file_is_a_formula_or_a_link",
        "ratelimits.billing.reports.exports.cells:_escaped",
        '.replace("<", "&lt;")',
        "",
    ),
    Defence(
        "tests/admin/test_row_files.py::test_an_export_can_be_imported_and_has_no_formulae",
        "ratelimits.files:neutral",
        '_FORMULA.sub("\'", text)',
        "text",
    ),
    Defence(
        "tests/test_security.py::test_a_line_break_in_an_account_forges_no_line_of_the_log",
        "ratelimits.rules.keyed:billing_around",
        "{account!r}",
        "{account}",
    ),
    Defence(
        "tests/usage/alerts/test_deliver.py::test_a_line_break_in_an_account_forges_no_line_of_the_log",
        "ratelimits.usage.alerts.deliver:_record_failure",
        "alert %r",
        "alert %s",
    ),
    Defence(
        "tests/usage/alerts/test_deliver.py::test_a_webhook_leads_only_to_public_addresses",
        "ratelimits.usage.posting:Connection.__init__",
        "if public_only:",
        "if False:",
    ),
    Defence(
        "tests/usage/test_posting.py::test_an_address_of_a_private_network_is_not_public",
        "ratelimits.usage.posting:is_public",
        "address.is_global and not",
        "not",
    ),
    Defence(
        "tests/usage/test_posting.py::test_nothing_of_what_is_not_http_is_read_back",
        "ratelimits.usage.posting:Connection.post",
        "except (http.client.HTTPException, ValueError):",
        "except ValueError:",
    ),
    Defence(
        "tests/admin/test_alerts.py::test_a_secret_is_kept_or_replaced_but_not_shown_again",
        "ratelimits.usage.admin.alerts:AlertChannelForm.clean_secret",
        'self.cleaned_data["secret"] or self.instance.secret',
        'self.cleaned_data["secret"]',
    ),
    Defence(
        "tests/admin/test_access.py::TestWhatIsShownOfOtherTables"
        "::test_a_webhook_s_secret_is_written_by_those_who_may_change_it_and_never_shown",
        "ratelimits.usage.admin.alerts:AlertChannelAdmin.get_fields",
        'if may_edit or name != "secret"',
        "",
    ),
    Defence(
        "tests/usage/api/test_access.py::test_a_customer_sees_its_own_account_and_nobody_else_s",
        "ratelimits.usage.api.views:wanted_identity",
        "account != caller.account_id",
        "not caller.account_id",
    ),
    Defence(
        "tests/usage/api/test_access.py::test_staff_need_the_permission_to_view_the_rows",
        "ratelimits.usage.api.views:wanted_identity",
        "not request.user.has_perm(permission)",
        "not permission",
    ),
    Defence(
        "tests/usage/ledger/retention/test_archives.py::test_a_forged_file_with_a_digest_of_its_own_is_not_restored",
        "ratelimits.usage.ledger.retention.archive:_read_file_lines",
        "digest.hexdigest() != recorded",
        "not recorded",
    ),
    Defence(
        "tests/billing/reports/verify/test_report.py::test_with_a_key_a_rebuilt_digest_is_not_enough",
        "ratelimits.usage.signatures:error_of",
        "if not keys or any(",
        "if True or any(",
    ),
    Defence(
        "tests/test_security.py::test_failed_logins_of_an_api_are_limited_by_the_middleware_alone",
        "ratelimits.middleware:limits_of",
        ' and not options.get("api_views")',
        "",
    ),
    Defence(
        "tests/test_security.py::test_failed_logins_of_the_admin_are_limited",
        "ratelimits.middleware:limits_of",
        "if found is None:",
        "if True:",
    ),
    Defence(
        "tests/identity/test_requests.py::TestApiKeys::test_a_row_whose_key_is_its_secret_is_a_digest",
        "ratelimits.naming:_plain",
        "return digest(value)",
        "pass",
    ),
    Defence(
        "tests/test_security.py::test_a_secret_is_in_no_key_no_log_and_no_line",
        "ratelimits.naming:_plain",
        "return digest(value)",
        "pass",
    ),
    Defence(
        "tests/test_security.py::test_a_shard_that_is_no_number_is_no_error",
        "ratelimits.usage.admin.ledger:ShardFilter.queryset",
        "chosen.isascii() and chosen.isdecimal()",
        "chosen.isdigit()",
    ),
    Defence(
        "tests/admin/test_operate.py::TestWhoMay::test_only_operators_add",
        "ratelimits.admin.operate.confirming:may_operate",
        "has_perm(OPERATE)",
        "is_staff",
    ),
    Defence(
        "tests/admin/changes/test_changes.py::TestTheReason::test_a_bulk_write_in_code_has_the_reason_of_its_block",
        "ratelimits.models.history:record",
        " or _reason.get()",
        "",
    ),
    Defence(
        "tests/admin/test_adjustments.py::test_a_period_at_the_end_of_the_calendar_is_an_error_at_its_field",
        "ratelimits.billing.models.adjustments:Adjustment._start_error",
        "except ValueError as error:",
        "except KeyError as error:",
    ),
)


def named_on_the_page() -> list[str]:
    """Return the tests that docs/security.md names, in order. The page leaves out the classes of tests."""
    return re.findall(r"`(tests/\S+::\w+)`", PAGE.read_text())


def function_of(defence: Defence) -> FunctionType:
    """Return the function with the line, without its decorators."""
    module, _colon, name = defence.function.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType)
    return function


def without(defence: Defence) -> Any:
    """Return the code of the function without the defence. Raise AssertionError if it does not have the line once."""
    function = function_of(defence)
    source = textwrap.dedent(inspect.getsource(function))
    source = changed(source, defence.line, defence.instead, defence.function)
    definition = _without_defaults(source[source.index("def ") :])
    names: dict[str, Any] = {}
    # In a class, `super()` finds its cell. The function keeps its own cell and its own globals.
    exec(f"from __future__ import annotations\nclass Around:\n{textwrap.indent(definition, '    ')}", {}, names)
    return vars(names["Around"])[function.__name__].__code__


def _without_defaults(definition: str) -> str:
    """Return a definition whose defaults are None. Only its code is used; the function keeps its defaults."""
    tree = ast.parse(definition)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.args.defaults = [ast.Constant(None) for _default in function.args.defaults]
    function.args.kw_defaults = [default and ast.Constant(None) for default in function.args.kw_defaults]
    return ast.unparse(tree)


@contextmanager
def taken_out(defence: Defence) -> Iterator[None]:
    """Run a block without the defence."""
    function = function_of(defence)
    kept, function.__code__ = function.__code__, without(defence)
    _forget(defence)
    try:
        yield
    finally:
        function.__code__ = kept
        _forget(defence)


def _forget(defence: Defence) -> None:
    """Clear the cache of the function, and of functions of its module that may have its results."""
    for value in list(vars(sys.modules[defence.function.partition(":")[0]]).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


class Removal:
    """A plugin of pytest that runs each test without its defence, and notes whether it failed."""

    def __init__(self, defences: Sequence[Defence]) -> None:
        self._defences = list(defences)
        self.failed: dict[Defence, bool] = dict.fromkeys(defences, False)

    def _defence_of(self, item: pytest.Item) -> Defence:
        name = item.nodeid.partition("[")[0]
        return next(defence for defence in self._defences if defence.test == name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run the test without its defence. A test that fails is as it should be, so the exception ends here."""
        defence = self._defence_of(item)
        with taken_out(defence):
            try:
                yield
            except (Exception, pytest.fail.Exception):  # noqa: BLE001  (whatever fails)
                self.failed[defence] = True


def run(defences: Sequence[Defence]) -> dict[Defence, bool]:
    """Run the tests of these defences; return whether at least one case of each fails without the defence."""
    removal = Removal(defences)
    names = dict.fromkeys(defence.test for defence in defences)
    options = ["-q", "--no-header", "-p", "no:randomly", "-n", "0", "-m", "system or not system"]
    status = pytest.main([*options, *names], plugins=[removal])
    assert status == pytest.ExitCode.OK, f"pytest ended with {status}"
    return removal.failed


def main(phrases: Sequence[str]) -> int:
    """Run the tests whose names contain one of the phrases (all tests without a phrase); return the exit status."""
    chosen = [one for one in DEFENCES if not phrases or any(phrase in one.test for phrase in phrases)]
    rounds: list[list[Defence]] = []
    for defence in chosen:
        # A test with several defences runs once for each.
        place = next((one for one in rounds if all(other.test != defence.test for other in one)), None)
        if place is None:
            rounds.append([defence])
        else:
            place.append(defence)
    failed = {defence: fails for one in rounds for defence, fails in run(one).items()}
    for defence, fails in failed.items():
        print(f"{'fails, as it should' if fails else 'STILL PASSES':20} {defence.test}  without {defence.function}")
    print(f"{sum(failed.values())} of {len(failed)} tests fail without their defences")
    return 0 if all(failed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
