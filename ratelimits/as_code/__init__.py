"""Plans and rules as code: a JSON document has the plans and rules of the database.

This package writes the document (`dump`) and loads it into the database (`load`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import transaction

from ratelimits.algorithms.limits import fields_of
from ratelimits.as_code.reading import DEFAULTS, Document, EntryPart, RefusedError, identity, parse, parts, printable
from ratelimits.models.accounts import Plan, PlanPart
from ratelimits.models.fields.rule_fields import PARAMETERS
from ratelimits.models.rules import Rule
from ratelimits.models.versions import editing
from ratelimits.progress import Progress

__all__ = [
    "Document",
    "RefusedError",
    "dump",
    "load",
    "parse",
    "parts",
    "problems_of",
    "quoted_name",
    "rule_as_code",
    "to_text",
]


def _json_number(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def rule_as_code(rule: Rule, plan: str | None) -> dict[str, Any]:
    """Return the entry of the document for a rule. `plan` is the slug of the rule's plan."""
    entry: dict[str, Any] = {"name": rule.name} | ({"plan": plan} if plan else {})
    entry |= {name: _json_number(value) for name, value in rule.parameters().items()}
    for name, default in DEFAULTS.items():
        value = _json_number(getattr(rule, name))
        if value != default:
            entry[name] = value
    return entry


def dump(using: str) -> Document:
    """Return all plans and rules of the database as a document."""
    plans = Plan.objects.using(using).prefetch_related(*(part.rows for part in parts.values())).order_by("slug")
    rules = Rule.objects.using(using).select_related("plan").order_by("plan__slug", "name")
    entries = [rule_as_code(rule, rule.plan.slug if rule.plan else None) for rule in rules]
    return {
        "plans": {plan.slug: _plan_as_code(plan) for plan in plans},
        "rules": sorted(entries, key=identity),
    }


def _plan_as_code(plan: Plan) -> dict[str, Any]:
    values = {
        word: {row.meter: part.value_of(row) for row in getattr(plan, part.rows).all()} for word, part in parts.items()
    }
    entry: dict[str, Any] = {"name": plan.name, "includes": values.pop("includes")}
    if plan.currency:
        entry["currency"] = plan.currency
    return entry | {word: of_meters for word, of_meters in values.items() if of_meters}


def to_text(document: Document) -> str:
    """Return a document as JSON text. Each plan and each rule has its own line."""
    plans = ",\n".join(f"    {json.dumps(slug)}: {json.dumps(plan)}" for slug, plan in document["plans"].items())
    rules = ",\n".join(f"    {json.dumps(entry)}" for entry in document["rules"])
    return (
        '{\n  "plans": {' + (f"\n{plans}\n  " if plans else "") + "},\n"
        '  "rules": [' + (f"\n{rules}\n  " if rules else "") + "]\n}\n"
    )


def load(
    document: Document,
    using: str,
    *,
    delete: bool = False,
    reason: str = "ratelimits_rules load",
    progress: Progress | None = None,
) -> list[str]:
    """Load the plans and rules of the document into the database, in one edit. Return a text for each change.

    With `delete`, also delete the plans and rules that the document does not have. If the entry of a plan has no
    currency or no prices, do not change the plan's currency or prices: an old file deletes none. The same holds for
    each part of a plan except what it includes. `reason` is written to the history of each
    changed rule. `progress` shows how many rules are done. If a plan or a rule is not valid, change nothing and raise
    RefusedError.
    """
    problems: list[str] = []
    with editing(using):
        before = dump(using)
        changes = _delete_rules(before, document, using) if delete else []
        changes += _load_plans(before, document, using, problems)
        # First save the rules that do not bill: a rule that begins to bill is refused while the rule that it replaces
        # still bills.
        entries = sorted(document["rules"], key=lambda entry: bool(entry.get("bills", False)))
        counted = (progress or Progress()).counted("rules", entries, len(entries))
        changes += _load_rules(before, counted, using, reason, problems)
        changes += _delete_plans(before, document, using, problems) if delete else []
        if problems:
            raise RefusedError(problems)
        if not changes:
            transaction.set_rollback(True, using=using)  # An edit without changes must not raise the version.
    return changes


def problems_of(document: Document, using: str) -> list[str]:
    """Return the problems for which `load` would refuse a document. Change nothing."""
    with transaction.atomic(using=using):
        try:
            load(document, using)
        except RefusedError as error:
            return error.problems
        transaction.set_rollback(True, using=using)
    return []


def _delete_rules(before: Document, document: Document, using: str) -> list[str]:
    wanted = {identity(entry) for entry in document["rules"]}
    deleted = [entry for entry in before["rules"] if identity(entry) not in wanted]
    for entry in deleted:
        _stored_rule(entry, using).delete(using=using)
    return [f"deleted rule {quoted_name(entry)}" for entry in deleted]


def _delete_plans(before: Document, document: Document, using: str, problems: list[str]) -> list[str]:
    changes = []
    for slug in before["plans"].keys() - document["plans"].keys():
        plan = Plan.objects.using(using).get(slug=slug)
        if plan.memberships.exists() or plan.accounts.exists():
            problems.append(f"plan “{slug}” cannot be deleted: first move its keys and accounts to another plan")
        else:
            plan.delete(using=using)
            changes.append(f"deleted plan {slug}")
    return changes


def _load_plans(before: Document, document: Document, using: str, problems: list[str]) -> list[str]:
    changes = []
    for slug, wanted in document["plans"].items():
        old = before["plans"].get(slug, {})
        kept = {name: value for name, value in old.items() if name not in ("name", "includes")}
        wanted = kept | wanted
        plan = Plan.objects.using(using).filter(slug=slug).first() or Plan(slug=slug)
        plan.name, plan.currency = wanted.get("name", slug), wanted.get("currency", "")
        try:
            rows = {word: _unsaved_rows(part, plan, wanted.get(word, {}), using) for word, part in parts.items()}
            plan.full_clean()
            changed = (old.get("name"), old.get("currency", "")) != (plan.name, plan.currency)
            if changed:
                plan.save(using=using)
            for word, part in parts.items():
                changed |= _save_rows(part, rows[word], old.get(word, {}), using)
        except ValidationError as error:
            problems += [f"plan “{slug}”: {line}" for line in _messages(error)]
            continue
        if changed:
            changes.append(f"{'changed' if old else 'added'} plan {slug}")
    return changes


def _unsaved_rows(part: EntryPart, plan: Plan, wanted: dict[str, Any], using: str) -> list[PlanPart]:
    """Return the rows of a part with the values of the document. They are not saved yet.

    Delete the rows of the plan that are not in the document.
    """
    rows = {row.meter: row for row in part.model._default_manager.using(using).filter(plan__slug=plan.slug)}
    for meter in rows.keys() - wanted.keys():
        rows.pop(meter).delete(using=using)
    for meter, value in wanted.items():
        row = rows.setdefault(meter, part.model(meter=meter))
        row.plan = plan
        for name, column in part.columns(value).items():
            setattr(row, name, column)
    return list(rows.values())


def _save_rows(part: EntryPart, rows: list[PlanPart], old: dict[str, Any], using: str) -> bool:
    """Save the rows that have changed. Return whether a row was changed, added or deleted."""
    changed = old.keys() != {row.meter for row in rows}
    for row in rows:
        row.plan = row.plan  # The row was made before a new plan was saved. This gives it the plan's primary key.
        try:
            row.full_clean()
        except ValidationError as error:
            messages = [f"{part.model._meta.verbose_name_raw} of {row.meter}: {line}" for line in _messages(error)]
            raise ValidationError({NON_FIELD_ERRORS: messages}) from error
        if part.value_of(row) != old.get(row.meter):
            row.save(using=using)
            changed = True
    return changed


def _load_rules(
    before: Document, entries: Iterable[dict[str, Any]], using: str, reason: str, problems: list[str]
) -> list[str]:
    changes = []
    old = {identity(entry): entry for entry in before["rules"]}
    for entry in entries:
        title, existing = quoted_name(entry), old.get(identity(entry))
        slug = entry.get("plan") or None
        plan = Plan.objects.using(using).filter(slug=slug).first() if slug else None
        if slug and plan is None:
            problems.append(f"rule {title}: there is no plan “{slug}”: add it under plans")
            continue
        rule = _stored_rule(entry, using) if existing else Rule(name=entry["name"], plan=plan)
        for name in fields_of(entry["algorithm"]):
            setattr(rule, name, entry.get(name, PARAMETERS[name]))
        for name, default in DEFAULTS.items():
            setattr(rule, name, entry.get(name, default))
        rule.algorithm = entry["algorithm"]
        try:
            rule.full_clean()
        except ValidationError as error:
            problems += [f"rule {title}: {line}" for line in _messages(error, rule)]
            continue
        if rule_as_code(rule, slug) != existing:
            rule._change_reason = reason
            rule.save(using=using)
            changes.append(f"{'changed' if existing else 'added'} rule {title}: {rule.sentence()}")
    return changes


def _stored_rule(entry: dict[str, Any], using: str) -> Rule:
    return Rule.objects.using(using).get(name=entry["name"], plan__slug=entry.get("plan"))


def quoted_name(entry: dict[str, Any]) -> str:
    """Return the name and the plan of a rule, in quotation marks, for messages."""
    return f"“{entry['name']}”" + (f" of plan “{entry['plan']}”" if entry.get("plan") else "")


def _messages(error: ValidationError, rule: Rule | None = None) -> list[str]:
    """Return a text for each error, with its field. If the field of `rule` has choices, the text lists them."""
    lines = []
    for field, errors in error.error_dict.items():
        for field_error in errors:
            if field_error.code == "invalid_choice" and rule is not None:
                column: Any = Rule._meta.get_field(field)
                choices = ", ".join(str(value) for value, _label in column.flatchoices if value)
                lines.append(f"{field} must be one of {choices}, not “{printable(str(getattr(rule, field)))}”")
            else:
                prefix = "" if field == NON_FIELD_ERRORS else f"{field}: "
                lines += [f"{prefix}{text}" for text in field_error.messages]
    return lines
