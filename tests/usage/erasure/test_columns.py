"""Test that whoever adds a column with text decides whether an erasure must replace names in it."""

from __future__ import annotations

from django.db import models

from tests.support.own_apps import own_models

#: The columns that can name a customer, by model. An erasure replaces the names in them, or deletes the rows.
NAMING = {
    "access": "target message reason",
    "account": "identifier name",
    "adjustment": "account key reason",
    "alert": "account key",
    "alertchannel": "email webhook_url",
    "alertdelivery": "error",
    "durabilitygap": "account event detail reason",
    "keyoverride": "key reason",
    "keyreset": "key account reason",
    "keytotal": "account key",
    "line": "account key",
    "move": "text reason",
    "name": "identifier",
    "periodusage": "account",
    "planmembership": "key",
    "processtotal": "account key",
    "pushdelivery": "customer event note",
    "quarantinedbatch": "fields reason content",
    "recordedrequest": "user api_key account address",
    "report": "account prices",
    "reportline": "key",
    "tombstone": "key",
    "upload": "content",
}
#: Columns with other text: digests, salts, numbers as text, names of rules, plans, meters, zones, processes and staff.
OTHERS = {
    "account": "timezone billing_anchor",
    "adjustment": "meter corrects_line_id salt",
    "alert": "meter rule_name",
    "alertchannel": "secret",
    "alertstate": "terms",
    "archivedrange": "archive incarnation previous_digest digest file_digest",
    "batch": "incarnation salt content previous_digest digest run sealed_run follows fence parts part_salts signature",
    "customer": "token salt",
    "durabilitygap": "shards incarnation fsync server acknowledged_by salt",
    "eraseddigest": "before after signature",
    "frozenperiod": "timezone label",
    "keyoverride": "rule",
    "keyreset": "rule",
    "keytotal": "meter",
    "line": "meter",
    "name": "salt",
    "periodusage": "meter",
    "plan": "name slug currency",
    "planinclusion": "meter",
    "planprice": "meter tiers",
    "processtotal": "process kind meter",
    "pushdelivery": "line_id meter",
    "pushreceiver": "name error",
    "quarantinedbatch": "name salt resolution",
    "recordedrequest": "scope method costs",
    "report": "timezone label plan included amounts since chain chain_head gaps previous_digest salt digest signature",
    "reportline": "line_id meter unit charge_category charge_class corrects_line_id limit rule plan batch_range",
    "rule": "scope except_scopes group view_key refusal_text name meter initial timezone anchor",
    "ruletotal": "meter",
    "shardstate": "incarnation run head",
    "taskrun": "error",
    "tombstone": "kind rule",
    "upload": "table by",
}
TEXTS = (models.CharField, models.TextField, models.JSONField, models.BinaryField)


def test_each_column_with_text_is_known() -> None:
    columns: dict[str, set[str]] = {}
    for model in own_models():
        if model._meta.proxy or not model._meta.managed:
            continue
        # A history has the columns of its model.
        name = str(model._meta.model_name).removeprefix("historical")
        texts = {field.name for field in model._meta.concrete_fields if isinstance(field, TEXTS) and not field.choices}
        columns[name] = columns.get(name, set()) | {text for text in texts if not text.startswith("history_")}
    columns = {name: texts for name, texts in columns.items() if texts}
    known = {
        name: {*NAMING.get(name, "").split(), *OTHERS.get(name, "").split()} for name in NAMING.keys() | OTHERS.keys()
    }
    assert columns == known
