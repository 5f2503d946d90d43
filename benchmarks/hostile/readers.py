"""Everything that reads a text from outside, each with texts that it can read. For benchmarks.hostile.

Import this module after Django was started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.http import HttpRequest, QueryDict
from django.test import override_settings
from rest_framework.exceptions import APIException
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.test import APIRequestFactory

from ratelimits import as_code, money
from ratelimits.addresses import address_of
from ratelimits.algorithms import typed_numbers, typed_rates
from ratelimits.algorithms.calendar import parse_anchor, zone
from ratelimits.billing.api.views import ReportQuery
from ratelimits.billing.pricing import tiers
from ratelimits.billing.reports.exports.csv import _marked_as_text
from ratelimits.engine.keys import ledger_name
from ratelimits.files import restorable, restored
from ratelimits.models import Access, Account, KeyOverride, Rule
from ratelimits.models.access import targets
from ratelimits.models.fields import view_key_texts
from ratelimits.models.fields.scopes import names_in, split_scope
from ratelimits.models.keys import canonical_key, key_name, validate_counted_key, validate_source
from ratelimits.naming import name_of
from ratelimits.row_files.comparing import Cells
from ratelimits.row_files.tables import TABLES, PlansAndRules, read
from ratelimits.simulate.lines import Reader as LineReader
from ratelimits.simulate.lines import decode_json, json_lines, read_rules
from ratelimits.status.keys import looks_secret, typed_key
from ratelimits.usage.api.serializers import UsageQuery, cursor
from ratelimits.usage.api.windows import PagePosition
from ratelimits.usage.ledger.packet import unescaped
from ratelimits.usage.periods import month_window
from ratelimits.view_keys import _source_and_reader

#: The errors by which a text is refused.
REFUSED = (ValueError, ValidationError, ImproperlyConfigured, APIException, TypeError)
_RULE = {"name": "a", "algorithm": "token_bucket", "capacity": 10, "rate": "5", "period": 1}


class TextReader(NamedTuple):
    """A function that reads a text. `valid` are texts that it accepts."""

    name: str
    read: Callable[[str], object]
    valid: tuple[str, ...]


def _request(**meta: str) -> HttpRequest:
    request = HttpRequest()
    request.META = {"REMOTE_ADDR": "10.0.0.1", **meta}
    return request


def _addresses(text: str) -> None:
    for given in ({"TRUSTED_PROXIES": ["10.0.0.0/8"]}, {"PROXIES": 2}):
        with override_settings(RATELIMITS=given):
            address_of(_request(HTTP_X_FORWARDED_FOR=text))
    with override_settings(RATELIMITS={}):
        address_of(_request(REMOTE_ADDR=text))


def _view_key(source: str) -> Callable[[str], object]:
    def read_value(text: str) -> None:
        found, reader = _source_and_reader(source)
        request = _request(HTTP_X_TENANT=text)
        request.GET = query = QueryDict(mutable=True)  # type: ignore[assignment]
        query["team"] = text
        value = reader(request, {"pk": text})
        view_key_texts.name_of(found, view_key_texts.normal_value(found, value or ""))

    return read_value


def _body(text: str) -> None:
    body = text.encode(errors="surrogatepass")
    posted = APIRequestFactory().post("/", body, content_type="application/json")
    request = Request(posted, parsers=[JSONParser()])
    found, reader = _source_and_reader("field:email|lower")
    view_key_texts.normal_value(found, reader(request, {}) or "")


def _query(serializer: Any, name: str) -> Callable[[str], object]:
    return lambda text: serializer(data={"period": "2026-10", name: text}).is_valid(raise_exception=True)


def _rows(model: Any, header: str) -> Callable[[str], object]:
    def read_rows(text: str) -> None:
        table = TABLES[model]
        source = read(f"{header}\n{text}".encode(errors="surrogatepass"), table)
        cells = Cells(table, PlansAndRules({}, {}))
        for line in source.lines:
            cells.values(dict(zip(source.columns, map(restored, line.cells), strict=False)))

    return read_rows


def _form_field(model: Any, name: str, *valid: str) -> TextReader:
    field: Any = model._meta.get_field(name)
    return TextReader(f"the field {model.__name__}.{name}", field.formfield().clean, valid)


def _trace(text: str) -> None:
    reader = LineReader(read_rules({**_RULE}))
    for _number, value in json_lines(text.encode(errors="surrogatepass").split(b"\n")):
        reader.line(value)


def readers() -> Iterator[TextReader]:
    """Yield every reader."""
    durations = "90", "1 day 12 h", "1d"
    rates = "10/s", "50 requests per minute", "10/5min", "5 per 1 day"
    keys = "user:42", "ip:203.0.113.9", "ip:2001:db8::/64", "account:a b", "header:X-Tenant=acme", "user:1, user:2"
    addresses = "203.0.113.9, 10.0.0.7", "[2001:db8::1]:80", "203.0.113.0/24"
    yield TextReader("a length of time", typed_rates.seconds, durations)
    yield TextReader("a rate", typed_rates.rate.__wrapped__, rates)
    yield TextReader("whether it is a rate", typed_rates.is_rate, rates)
    yield TextReader("a key", validate_counted_key, keys)
    yield TextReader("a key, as it is stored", canonical_key, keys)
    yield TextReader("the name of a key", key_name, keys)
    yield TextReader("a typed key", typed_key, keys + addresses)
    yield TextReader("a key or a secret", looks_secret, (*keys, "sk_live_1a2b3c4d5e6f7g8h9i0j", "a" * 19 + "1"))
    yield TextReader("a blocked key or network", targets.canonical, keys + addresses)
    yield TextReader("a name in Redis", ledger_name, ("acme",))
    yield TextReader("a name from a hook", name_of, ("acme", "user:7"))
    yield TextReader("where a view finds a key", validate_source, ("header:X-Tenant", "field:email|lower"))
    for source in ("header:X-Tenant", "query:team", "query:team|lower", "arg:pk"):
        yield TextReader(f"the value of {source}", _view_key(source), ("acme", "-1.0", "é", "12"))
    yield TextReader("a JSON body", _body, ('{"email": "a@example.com"}', '{"email": 12.0}'))
    yield TextReader("a header with addresses", _addresses, addresses)
    yield TextReader("a scope", split_scope, ("search:POST,PUT", "*"))
    yield TextReader("names of scopes", names_in, ("health, webhooks",))
    yield TextReader("tiers", tiers.parse, ("1000: 0.10\nmore: 0.05 + 3", "more: 1"))
    yield TextReader("a price", money.read, ("0.10",))
    yield TextReader("a typed number", typed_numbers.decimal, ("1000.5", "1 000"))
    yield TextReader("an anchor", parse_anchor, ("2026-01-31T06:00",))
    yield TextReader("a time zone", zone, ("Europe/Paris",))
    yield TextReader("a month", month_window, ("2026-10",))
    one_rule = json.dumps({"rules": [_RULE]})
    yield TextReader("rules as code", lambda text: as_code.parse(text.encode(errors="surrogatepass")), (one_rule,))
    yield TextReader(
        "a rule file", lambda text: read_rules(decode_json(text.encode(errors="surrogatepass"))), (json.dumps(_RULE),)
    )
    yield TextReader("a trace", _trace, ('{"at": 12.5, "op": "try_acquire", "cost": 3, "key": "a"}',))
    overrides = "key,rule,capacity,rate,period,valid_from,reason"
    yield TextReader(
        "uploaded overrides", _rows(KeyOverride, overrides), ("user:1,burst,10/min,,,2026-01-01,'=x", '"a ""b""",,,,,,')
    )
    yield TextReader("uploaded accounts", _rows(Account, "identifier,name,billing_anchor"), ("1,Acme,2026-01-31",))
    yield TextReader("a cell of a spreadsheet", restored, ("'=1;'=2", "a"))
    yield TextReader("a text for a spreadsheet", restorable, ("=1;=2", 'a; "=1'))
    yield TextReader("a text that a spreadsheet misreads", _marked_as_text.__wrapped__, ("1e5", "3 Mar", "12-45"))
    yield TextReader("a field of a batch", unescaped, ("a\\tb", "a"))
    for name, valid in (
        ("cursor", cursor(PagePosition(1, "a", "b", "c"))),
        ("key", "user:42"),
        ("from", "2026-11-01T00:00:00Z"),
        ("page_size", "100"),
        ("timezone", "Europe/Paris"),
        ("window", "day"),
    ):
        yield TextReader(f"the parameter {name} of the API", _query(UsageQuery, name), (valid,))
    yield TextReader("the parameter period of the API", _query(ReportQuery, "period"), ("2026-10",))
    yield _form_field(Rule, "name", "burst")
    yield _form_field(Rule, "scope", "search:POST,PUT")
    yield _form_field(Rule, "capacity", "10")
    yield _form_field(Rule, "rate", "10/min", "0.5")
    yield _form_field(Rule, "period", "5 min")
    yield _form_field(Rule, "except_scopes", "health, webhooks")
    yield _form_field(Rule, "view_key", "field:email|lower")
    yield _form_field(Access, "target", "203.0.113.0/24")
    yield _form_field(KeyOverride, "key", *keys)
    yield _form_field(Account, "billing_anchor", "2026-01-31T06:00")
    yield _form_field(Account, "timezone", "Europe/Paris")
