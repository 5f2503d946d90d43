"""Choose the tests of a run, and say at its end which tests were left out and how to run them.

Without options, a run that names no tests is quick: it has the fast tests and a few of each kind of slow test.
`--complete` runs all tests that need only Python packages, and `--rest` those of them that a quick run leaves out.
`--borders` runs those whose result can depend on the server or the database: for a run with others than usual.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

#: Folders and modules that `-m "not slow"` leaves out: they start or kill processes and servers, cut the power,
#: measure, write very large reports, judge very many cases, or take many seconds of processor time. In other modules,
#: single tests have the mark `slow`, and some tests leave all but a few of their cases to complete runs (`few`).
SLOW = (
    "admin/changes/test_changes.py",
    "admin/changes/test_undoing.py",
    "admin/inspect/test_page.py",
    "admin/rule_form/test_form.py",
    "admin/test_access.py",
    "admin/test_adjustments.py",
    "admin/test_form_values.py",
    "admin/test_forms.py",
    "admin/test_lists.py",
    "admin/test_naive.py",
    "admin/test_open_periods.py",
    "admin/test_operate.py",
    "admin/test_reports.py",
    "admin/test_rules.py",
    "admin/test_strange_urls.py",
    "admin/test_two_databases.py",
    "admin/test_usage.py",
    "usage/alerts/test_crashes.py",
    "usage/alerts/test_evaluate.py",
    "algorithms/test_new.py",
    "usage/api/test_nonsense.py",
    "as_code/test_nonsense.py",
    "as_code/test_page.py",
    "background/test_threads.py",
    "checks/test_every_setting.py",
    "chaos",
    "usage/customers/test_belongings.py",
    "usage/customers/test_move_crashes.py",
    "embedded/test_shared.py",
    "end_to_end",
    "engine/test_agreement.py",
    "engine/test_assemble.py",
    "engine/test_bounded.py",
    "engine/test_together.py",
    "usage/erasure/test_any_order.py",
    "identity/test_projects.py",
    "identity/test_typed_names.py",
    "identity/test_who.py",
    "models/raw/test_adoption.py",
    "models/test_migrations.py",
    "models/test_replicas.py",
    "testing/test_transactions.py",
    "moving/test_guide.py",
    "outbound/test_celery.py",
    "outbound/test_processes.py",
    "billing/push/test_push.py",
    "usage/counting/test_from_ledger.py",
    "reference/test_properties.py",
    "billing/reports/closing/test_any_terms.py",
    "billing/reports/closing/test_close.py",
    "billing/reports/closing/test_limits_of_periods.py",
    "billing/reports/exports/test_streaming.py",
    "billing/reports/test_amounts.py",
    "billing/reports/test_billing_pages.py",
    "billing/reports/test_included.py",
    "billing/reports/test_kept_database.py",
    "billing/reports/test_months.py",
    "billing/reports/test_new_column.py",
    "billing/reports/test_push_crashes.py",
    "billing/reports/test_same_bytes.py",
    "billing/reports/verify/test_attacks.py",
    "billing/reports/verify/test_beside.py",
    "billing/reports/verify/test_conditional.py",
    "billing/reports/verify/test_manifest.py",
    "billing/reports/verify/test_report.py",
    "billing/reports/verify/test_tampering.py",
    "rules/test_commands.py",
    "rules/test_validity.py",
    "runtimes",
    "simulate/test_command.py",
    "test_alike.py",
    "test_benchmarks.py",
    "test_installing.py",
    "test_oldest_servers.py",
    "test_quickstart.py",
    "testing/test_production.py",
    "testing/test_projects.py",
    "usage/ledger/test_celery.py",
    "usage/ledger/test_clocks.py",
    "usage/ledger/test_crashes.py",
    "usage/ledger/test_fence.py",
    "usage/ledger/test_gaps.py",
    "usage/ledger/test_power_cuts.py",
    "usage/ledger/test_runs.py",
    "without",
)
#: The slow tests that a quick run has too: a few of each kind. Without brackets, all cases of a test.
SAMPLE = (
    "admin/test_naive.py::test_a_form_that_is_sent_again_changes_no_moment",
    "admin/test_naive.py::test_lists_and_forms_show_the_projects_time_zone",
    "admin/test_strange_urls.py::test_a_list_shows_its_filters_with_counts[/admin/ratelimits_usage/batch/]",
    "admin/test_strange_urls.py::test_a_list_with_a_strange_filter_answers[Account]",
    "admin/test_strange_urls.py::test_a_page_of_a_row_that_is_not_there_is_not_found[ratelimits_rule_history]",
    "admin/test_strange_urls.py::test_an_action_on_a_strange_id_changes_nothing[Account]",
    "usage/alerts/test_evaluate.py::test_a_larger_plan_in_mid_period_has_each_threshold_said_of_it",
    "usage/alerts/test_evaluate.py::test_each_threshold_of_what_the_plan_includes_is_reached_once",
    "usage/alerts/test_evaluate.py::test_periods_that_were_over_before_the_first_look_are_left_alone_and_later_ones_are_not",
    "chaos/test_faults.py::test_a_fault_breaks_no_promise[killed]",
    "checks/test_every_setting.py::test_check_names_the_setting_in_the_whole_project[None]",
    "checks/test_every_setting.py::test_check_names_the_setting_in_the_whole_project[broken]",
    "end_to_end/test_cluster.py::test_a_decision_over_three_nodes_says_what_one_server_would",
    "end_to_end/test_cluster.py::test_the_async_functions_do_the_same",
    "end_to_end/test_cluster.py::test_usage_of_accounts_on_every_node_is_sealed_and_drained_once",
    "end_to_end/test_live.py::test_what_the_clients_counted_is_what_the_ledger_says_and_a_lost_line_is_noticed",
    "end_to_end/test_restricted.py::test_a_check_names_what_is_refused_and_the_right",
    "end_to_end/test_restricted.py::test_a_proxy_that_hides_the_run_from_info_hides_it_from_nobody",
    "end_to_end/test_restricted.py::test_a_user_who_cannot_load_scripts_is_limited_after_a_flush",
    "end_to_end/test_restricted.py::test_a_user_without_config_has_an_honest_fence",
    "end_to_end/test_restricted.py::test_a_user_without_info_is_limited_and_counted",
    "end_to_end/test_topologies.py::test_over_a_unix_socket",
    "identity/test_typed_names.py::test_a_user_is_one_account_whoever_says_it",
    "identity/test_typed_names.py::test_a_user_whose_account_has_the_users_name_has_one_count",
    "identity/test_typed_names.py::test_an_account_called_hyphen_is_not_no_account",
    "identity/test_typed_names.py::test_calls_to_others_have_names_that_requests_can_have",
    "billing/push/test_push.py::test_a_failure_of_the_receiver_is_tried_again_later_each_time",
    "billing/push/test_push.py::test_a_lost_answer_is_asked_for_again_under_the_same_identity_and_billed_once",
    "billing/push/test_push.py::test_a_refused_event_says_why_holds_up_no_other_and_can_be_sent_again",
    "billing/push/test_push.py::test_a_report_is_pushed_line_by_line_and_never_again",
    "billing/reports/closing/test_close.py::test_a_frozen_shard_is_not_finalised",
    "billing/reports/closing/test_close.py::test_late_usage_of_a_closed_period_is_a_further_version_that_names_what_it_corrects",
    "billing/reports/closing/test_close.py::test_what_is_taken_off_later_comes_off_the_overage_first",
    "billing/reports/test_amounts.py::test_a_line_that_reaches_into_another_tier_costs_what_each_unit_does",
    "billing/reports/test_amounts.py::test_a_report_says_what_each_line_and_the_account_owe",
    "billing/reports/verify/test_report.py::test_a_new_key_leaves_what_an_old_one_signed_verifiable",
    "billing/reports/verify/test_report.py::test_with_a_key_a_rebuilt_digest_is_not_enough",
    "runtimes/test_promises.py::test_promises_are_kept[fork]",
    "test_oldest_servers.py::test_a_few_tests_pass_on_redis_6_2_and_postgresql",
    "testing/test_production.py::test_mail_in_memory_is_no_test_run",
    "testing/test_production.py::test_no_room_but_the_testing_kit_asks_whether_a_test_runs",
    "usage/ledger/test_crashes.py::test_workers_and_drainers_that_race_and_die_between_any_two_steps_lose_and_double_nothing",
    "usage/ledger/test_gaps.py::test_a_fork_is_quarantined_and_freezes_the_watermark",
    "usage/ledger/test_gaps.py::test_a_sealed_batch_that_was_lost_is_missing_with_what_was_in_it",
    "usage/ledger/test_gaps.py::test_an_older_state_of_a_batch_is_discarded_and_declared",
    "without/test_projects.py::test_a_project_without_it_works[everything]",
)
#: The folders, modules and tests of what speaks to the server or the database.
BORDERS = (
    "algorithms/test_calendar.py::TestWindows",
    "as_code",
    "billing/reports",
    "chaos/test_faults.py::test_a_fault_breaks_no_promise[postgres_away]",
    "doctor",
    "end_to_end/test_restricted.py",
    "engine",
    "usage/erasure/test_erase.py",
    "models",
    "quota/test_deny_cache.py",
    "quota/test_prefetch.py",
    "quota/test_refusal_counts.py",
    "rules",
    "simulate/test_replay.py",
    "usage/customers",
    "usage/ledger",
    "without/test_projects.py::test_a_project_without_it_works[admin]",
    "without/test_projects.py::test_a_project_without_it_works[usage]",
)
#: Modules and tests of them that say the same on any server and database. They ask neither, compare results of one
#: server, bring databases of their own, do what a page says, or draw cases at random for what these servers do not
#: compute.
ALIKE = (
    "as_code/test_nonsense.py::test_any_bytes_are_read_or_refused",
    # The case token_bucket has every field.
    *(
        f"as_code/test_nonsense.py::test_each_field_with_each_type_is_loaded_or_refused_with_a_sentence[{algorithm}]"
        for algorithm in (
            *("calendar_window", "concurrency", "fixed_window", "gcra", "leaky_bucket", "leaky_bucket_queue"),
            *("sliding_log", "sliding_window", "smooth_bursty", "smooth_warming_up"),
        )
    ),
    "as_code/test_nonsense.py::test_so_it_is_in_a_rule_file_of_the_simulator",
    "as_code/test_page.py",
    "engine/test_assemble.py::test_records_in_another_order_decide_alike",
    "engine/test_assemble.py::test_scripts_with_tables_decide_as_scripts_with_local_variables",
    "engine/test_assemble.py::test_the_general_script_decides_as_the_scripts_of_single_shapes",
    "engine/test_assemble.py::test_without_one_of_its_lines_it_decides_otherwise",
    "engine/test_assemble.py::test_without_one_of_its_lines_it_does_not",
    "engine/test_bounded.py::test_no_call_does_more_the_more_there_is",
    "engine/test_pairs.py",
    "engine/test_program.py",
    "engine/transport/test_breaker.py",
    "models/access/test_targets.py",
    "models/fields/test_view_key_texts.py",
    "billing/reports/closing/test_any_terms.py",
    "billing/reports/exports/test_cloudevents.py",
    "billing/reports/exports/test_csv.py",
    "billing/reports/exports/test_json.py",
    "billing/reports/exports/test_streaming.py",
    "billing/reports/exports/test_workbook.py",
    "billing/reports/exports/test_xlsx.py",
    "billing/reports/test_amounts.py::test_whatever_came_when_the_sum_of_all_versions_is_the_price_of_the_final_quantities",
    "billing/reports/test_billing_pages.py",
    "billing/reports/test_kept_database.py",
    "billing/reports/test_new_column.py",
    "billing/reports/test_same_bytes.py",
    "rules/test_access.py",
    "rules/test_validity.py::test_at_any_moment_it_answers_as_a_snapshot_made_this_very_moment",
    "usage/ledger/test_packet.py",
)
#: The modules with the longest tests (ten seconds and more). A run begins with them: pytest-xdist gives them to one
#: process, and the others take from the end of what it has to do.
LONGEST = (
    "as_code/test_page.py",
    "browser/test_pages.py",
    "end_to_end/test_demo.py",
    "identity/test_projects.py",
    "billing/reports/test_same_bytes.py",
    "billing/reports/verify/test_tampering.py",
    "test_quickstart.py",
    "usage/ledger/test_power_cuts.py",
)
#: What a module has whose own marks leave tests to a complete run.
_MARKED = re.compile(r"mark\.system|mark\.slow|\bfew\(")
_TESTS = Path(__file__).resolve().parents[1]
_SLOW = {_TESTS / place for place in SLOW}
_LONGEST = {_TESTS / place for place in LONGEST}
_SAMPLED = {_TESTS / name.partition("::")[0] for name in SAMPLE}
#: The modules from which `--borders` takes single tests.
_PARTLY = {_TESTS / name.partition("::")[0] for name in BORDERS if "::" in name}
#: What a run leaves out -> how to run it.
_HOW = {
    "slow": "python -m pytest -n auto --complete",
    "quick": "python -m pytest -n auto",
    "other": "python -m pytest -n auto --complete",
    "system": "-m system; they need Debian packages, see .ci/run",
    "long": "--long",
}
_SELECTION = pytest.StashKey[str]()
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def few(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases of an argument for `parametrize`. All but those that are repeated in `quick` are slow."""
    found = list(cases)
    assert all(case in found for case in quick), quick
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in found]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="run all tests that need only Python packages")
    parser.addoption("--rest", action="store_true", help="run only the tests that a run without options leaves out")
    parser.addoption("--borders", action="store_true", help="run what can depend on the server or the database")
    parser.addoption("--long", action="store_true", help="run all tests, and the long suites in full")


def pytest_configure(config: pytest.Config) -> None:
    """Decide which tests the run has. The processes of pytest-xdist are told by the first process."""
    told: dict[str, Any] | None = getattr(config, "workerinput", None)
    config.stash[_SELECTION] = _selection(config) if told is None else told["selection"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist which tests the run has."""
    node.workerinput["selection"] = node.config.stash[_SELECTION]


def _selection(config: pytest.Config) -> str:
    if config.option.long or config.option.complete:
        return "all"
    if config.option.rest:
        return "rest"
    if config.option.borders:
        return "borders"
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    marked = any(argument.startswith("-m") for argument in config.invocation_params.args)
    return "all" if named or marked or config.option.keyword else "quick"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than there are cores: many tests wait for other processes."""
    return (os.cpu_count() or 1) + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not read a module of which the run has no test: each process would read it, for a third of its start."""
    kind = left_out_as(collection_path, config)
    if kind is None:
        return None
    config.stash.setdefault(_LEFT_OUT, Counter())[f"{kind} modules"] += 1
    return True


def left_out_as(path: Path, config: pytest.Config) -> str | None:
    """Return the kind of tests as which the run leaves out this whole module; None if it reads the module."""
    if not path.name.startswith("test_") or path.suffix != ".py":
        return None
    selection, slow = config.stash[_SELECTION], _is_slow(path)
    if selection == "quick" and slow and path not in _SAMPLED:
        return "slow"
    if selection == "rest" and not slow and not _MARKED.search(path.read_text()):
        return "quick"
    if selection == "borders" and not _is_border(path.relative_to(_TESTS).as_posix()) and path not in _PARTLY:
        return "other"
    return None


def _is_border(name: str) -> bool:
    """Return whether a module, or a test by its name below tests/, is of BORDERS and not of ALIKE."""
    parts = name.partition("[")[0].split("::")
    places = {"::".join(parts[: count + 1]) for count in range(len(parts))}
    names = {name, *places, *map(str, Path(parts[0]).parents)}
    return not names.isdisjoint(BORDERS) and names.isdisjoint(ALIKE)


def _is_slow(path: Path) -> bool:
    return not _SLOW.isdisjoint((path, *path.parents))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what SLOW names. System tests too: a `-m` on the command line replaces the one that leaves them out."""
    if _is_slow(item.path) or item.get_closest_marker("system"):
        item.add_marker("slow")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Leave out (deselect, never skip) what does not belong to the run. Begin with the longest and slow tests.

    A process that came to one of these last would work on alone. They also wait most, while the others compute. They
    are put first when the other plugins have sorted: pytest-django sorts by the database that tests need.
    """
    _choose(config, items)
    yield
    items.sort(key=lambda item: (item.path not in _LONGEST, item.get_closest_marker("slow") is None))


def _choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection, system = config.stash[_SELECTION], config.option.markexpr == "not system"
    if selection in ("quick", "rest"):
        _check_names("SAMPLE and LONGEST", [*SAMPLE, *LONGEST], items)
    if selection == "borders":
        # Some cases exist only on PostgreSQL.
        _check_names("BORDERS and ALIKE", [name.partition("[")[0] for name in (*BORDERS, *ALIKE)], items)
    chosen, left_out = [], []
    counts = config.stash.setdefault(_LEFT_OUT, Counter())
    for item in items:
        kind = _kind(item)
        if (
            (kind == "long" and not config.option.long)
            or (kind == "slow" and selection == "quick")
            or (kind == "quick" and selection == "rest")
        ):
            left_out.append(item)
            counts[f"{kind} tests"] += 1
        elif selection == "borders" and not _is_border(item.nodeid.removeprefix("tests/")):
            left_out.append(item)
            counts["other tests"] += 1
        else:
            chosen.append(item)
            counts["system tests"] += kind == "system" and system  # pytest itself leaves these out
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def _kind(item: pytest.Item) -> str:
    if item.get_closest_marker("long"):
        return "long"
    if item.get_closest_marker("system"):
        return "system"
    return "slow" if item.get_closest_marker("slow") and not _is_sample(item.nodeid) else "quick"


def _is_sample(nodeid: str) -> bool:
    name = nodeid.removeprefix("tests/")
    return name in SAMPLE or name.partition("[")[0] in SAMPLE


def _check_names(where: str, named: Collection[str], items: Collection[pytest.Item]) -> None:
    """Raise UsageError if a list names tests that do not exist, so that no change of a name changes what a run has."""
    names = {item.nodeid.removeprefix("tests/") for item in items}
    names |= {name.partition("[")[0] for name in names}
    names |= {name.rpartition("::")[0] for name in names}
    if lost := {name for name in named if name not in names and ("::" in name or not (_TESTS / name).exists())}:
        raise pytest.UsageError(f"{where} in {__name__}: these tests do not exist: {', '.join(sorted(lost))}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the first process of pytest-xdist what this process left out."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        left_out: Counter[str] = session.config.stash.get(_LEFT_OUT, Counter())
        output["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process of pytest-xdist left out. Each of them has collected all tests."""
    node.config.stash[_LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests the run left out, and how to run them."""
    left_out = config.stash.get(_LEFT_OUT, None) or Counter[str]()
    said = []
    for kind, how in _HOW.items():
        found = [f"{left_out[what]:,} {what}" for what in (f"{kind} modules", f"{kind} tests") if left_out[what]]
        if found:
            said.append(f"{' and '.join(found)} ({how})")
    if said:
        terminalreporter.write_line(f"Left out: {'; '.join(said)}.")
