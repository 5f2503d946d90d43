"""The mistakes that `python -m tests.long.faults` plants: small ones, at least one in almost every room."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A mistake that a change of the code could bring.

    name     what the code does wrong
    file     the file of ratelimits/ with the mistake
    tests    the tests of the room, below tests/
    text     a text that occurs once in the file
    instead  the text that replaces it
    """

    name: str
    file: str
    tests: str
    text: str
    instead: str

    @property
    def room(self) -> str:
        """Return the package or module of an app with the mistake."""
        app, _slash, inner = self.file.partition("/")
        room = inner if app in ("usage", "billing") else self.file
        return room.partition("/")[0].removesuffix(".py")


FAULTS = (
    Fault(
        "a text that began with an apostrophe loses it",
        "files.py",
        "test_files.py",
        """neutral(_MARK.sub("''", text))""",
        "neutral(text)",
    ),
    Fault(
        "the query of a webhook's URL is left out",
        "usage/posting.py",
        "usage/test_posting.py",
        '(f"?{parts.query}" if parts.query else "")',
        '""',
    ),
    Fault(
        "each message that is left out makes the silence longer",
        "logs.py",
        "test_logs.py",
        "_messages[name, message] = not_before, left_out + 1",
        "_messages[name, message] = now + INTERVAL, left_out + 1",
    ),
    Fault(
        "the middleware does not finish a sync request",
        "middleware.py",
        "quota/test_finishing.py",
        "        finishing.finish(request, response)\n",
        "",
    ),
    Fault(
        "an async view that has returned keeps its lease",
        "decorators.py",
        "test_decorators.py",
        "            await finishing.aleave(plain, response)\n",
        "",
    ),
    Fault(
        "the value 0 of a view's key counts as no value",
        "view_keys.py",
        "test_view_keys.py",
        "return str(value) if is_number else None",
        "return str(value) if is_number and value else None",
    ),
    Fault(
        "the first entry of X-Forwarded-For is the client",
        "addresses.py",
        "test_addresses.py",
        "last_entries[-from_end]",
        "last_entries[0]",
    ),
    Fault(
        "a response that an async operation makes has no headers",
        "ninja.py",
        "ninja",
        "_with_headers(await operation(request, **values), answer)",
        "await operation(request, **values)",
    ),
    Fault(
        "the breaker opens one failure late",
        "engine/transport/breaker.py",
        "engine",
        "if self.failures < FAILURES:",
        "if self.failures <= FAILURES:",
    ),
    Fault(
        "a refund gives back what an earlier window was charged",
        "lua/algorithms/window.lua",
        "engine",
        " and not (charged_at > 0 and charged_at < l.start)",
        "",
    ),
    Fault(
        "a new incarnation does not say which batch it follows",
        "lua/batch.lua",
        "usage/ledger",
        "if incarnation and seq then last_before",
        "if false then last_before",
    ),
    Fault(
        "spent prefetched permits are counted again at each sending",
        "lua/counting/spent.lua",
        "quota",
        "local requests = spent - counted",
        "local requests = spent",
    ),
    Fault(
        "a month that is counted from the 31st starts on the 28th",
        "algorithms/calendar.py",
        "algorithms",
        "min(day.day, monthrange(year, month)[1])",
        "min(day.day, 28)",
    ),
    Fault(
        "a request whose client has gone is refunded",
        "quota/finishing.py",
        "quota",
        "failed=not isinstance(error, _CLIENT_GONE)",
        "failed=True",
    ),
    Fault(
        "a rule that names GET does not cover HEAD",
        "rules/selection.py",
        "rules",
        ' or (method == "HEAD" and "GET" in row.methods)',
        "",
    ),
    Fault(
        "bulk_update tells no process which rows to read again",
        "models/versioned.py",
        "models",
        "            write_tombstones(before, rows, edit)\n",
        "",
    ),
    Fault(
        "a batch's digest does not cover the run that sealed it",
        "usage/ledger/packet.py",
        "usage/ledger",
        "        batch.sealed_run,\n",
        "",
    ),
    Fault(
        "shares of included quantities are rounded down",
        "billing/reports/included.py",
        "billing/reports",
        "int(total + Fraction(1, 2))",
        "int(total)",
    ),
    Fault(
        "half a cent is always rounded up",
        "money.py",
        "billing/pricing",
        "rounding=ROUND_HALF_EVEN",
        'rounding="ROUND_HALF_UP"',
    ),
    Fault(
        "a line that was certainly not accepted can be settled as accepted",
        "billing/push/settle.py",
        "billing/push",
        "decision == Settlement.ACCEPTED and row.state != State.UNSURE",
        "decision == Settlement.ACCEPTED and row.state == State.SKIPPED",
    ),
    Fault(
        "the first pause of a failed alert is twice as long",
        "usage/alerts/deliver.py",
        "usage/alerts",
        "2 ** (attempts - 1)",
        "2**attempts",
    ),
    Fault(
        "who resolved a quarantined batch is not in the admin's log",
        "usage/admin/quarantine.py",
        "admin",
        "            self.log_change(request, quarantined, resolution)\n",
        "",
    ),
    Fault(
        "rules of other scopes limit the API of the app itself",
        "usage/api/views.py",
        "usage/api",
        "if rule.rule in rows and rows[rule.rule].scope == scope)",
        "if rule.rule in rows)",
    ),
    Fault(
        "refusals in several meters are added up",
        "usage/status/refusals.py",
        "usage/status",
        "max(largest.get(subject, 0), denied)",
        "largest.get(subject, 0) + denied",
    ),
    Fault(
        "the check of a restored database warns of equal versions",
        "checks/settings.py",
        "checks",
        "if in_redis <= in_database:",
        "if in_redis < in_database:",
    ),
    Fault(
        "the network of all addresses can be a trusted proxy",
        "conf/setting_rules.py",
        "conf",
        ".prefixlen > 0",
        ".prefixlen >= 0",
    ),
    Fault(
        "a line of a file overlaps the stored row that it replaces",
        "row_files/comparing.py",
        "row_files",
        "[row for row in stored if row.pk not in replaced]",
        "list(stored)",
    ),
    Fault(
        "to load rules that are loaded already raises the version",
        "as_code/__init__.py",
        "as_code",
        "        if not changes:",
        "        if False:",
    ),
    Fault(
        "requests that could not be recorded are forgotten after a second failure",
        "usage/recording.py",
        "usage/test_recording.py",
        "_leave_out(left_out + len(requests))",
        "_leave_out(len(requests))",
    ),
    Fault(
        "a call waits as long as if it accepted no wait",
        "outbound/waiting.py",
        "outbound",
        "return turn.retry_after + max(timeout, 0)",
        "return turn.retry_after",
    ),
    Fault(
        "two rates of a view with one cache key share a counter",
        "throttling/by_rates.py",
        "throttling",
        "        cache_keys.add(key_and_rate.cache_key)\n",
        "",
    ),
    Fault(
        "the rule for AnonRateThrottle limits signed-in users too",
        "moving/rates.py",
        "moving",
        '{"key_kind": "ip", "callers": "anonymous"}',
        '{"key_kind": "ip"}',
    ),
    Fault(
        "a rule keeps its state under another algorithm",
        "simulate/replay.py",
        "simulate",
        "if term.algorithm.id != rule.id",
        "if False",
    ),
    Fault(
        "one rule more than the maximum has a counter",
        "telemetry/prometheus.py",
        "telemetry",
        "if len(_rules) >= MAX_RULES:",
        "if len(_rules) > MAX_RULES:",
    ),
    Fault(
        "a restarted server has another port",
        "embedded.py",
        "embedded",
        "address = self.path or self.port or free_port()",
        "address = self.path or free_port()",
    ),
    Fault(
        "a request that ends after the signal does not write its counts",
        "background.py",
        "background",
        "            self._stopping = True\n",
        "",
    ),
    Fault(
        "terms of reports are not verified",
        "billing/verification.py",
        "billing/reports/verify",
        'yield "the terms of reports", verify_terms(using, checked)',
        "pass",
    ),
    Fault(
        "a user without a row of an account is unknown as an account",
        "unknown_names.py",
        "test_unknown_names.py",
        'accounts | accounts_without_rows(named["account"] - accounts)',
        "accounts",
    ),
    Fault(
        "what the fallback counted outlives the stopped clock",
        "testing/tools.py",
        "testing",
        "        without_decision.local.clear()\n",
        "",
    ),
    Fault(
        "the time left is the time of the whole task",
        "management/progress.py",
        "management",
        "(stage.total - done) * seconds / done",
        "stage.total * seconds / done",
    ),
)
