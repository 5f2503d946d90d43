"""Replacing a customer's names in the configuration and its history. Its overrides, blocks and allows are deleted."""

from __future__ import annotations

from typing import Any

from ratelimits.models import Access, Account, Customer, KeyOverride, Name, PlanMembership, Tombstone
from ratelimits.models.customers import waiting_text
from ratelimits.models.history import because, erased_because
from ratelimits.models.keys import key_name, key_shard
from ratelimits.models.periods import keeping_terms
from ratelimits.models.versioned import versioned_models
from ratelimits.models.versions import ConfigVersion, editing
from ratelimits.salts import new_salt
from ratelimits.usage.erasure.about import About
from ratelimits.usage.ledger.verify.row_digests import record_columns, record_digest
from ratelimits.usage.models import AlertChannel, PeriodUsage, erased

#: The models whose rows are about a key, each with the column of the key and its columns with texts that people wrote.
_KEYED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (KeyOverride, "key", ("reason",)),
    (PlanMembership, "key", ()),
    (Access, "target", ("message", "reason")),
)
#: The rows that were changed, by model.
Changed = dict[str, set[int]]


def erase_names(about: About, version: int) -> None:
    """Give the customer a pseudonym in place of each of its account texts.

    If other customers had a text too, it stays with them; from the customer's present span on, the text names a new
    customer. Such a text gets another salt.
    """
    names = Name.objects.using(about.using)
    for text in about.texts:
        dated = list(names.filter(identifier=text).order_by("since"))
        others = [name for name in dated if name.customer_id != about.customer.pk and _has_used(about, name)]
        if others and dated[-1].customer_id == about.customer.pk:
            new = Customer.objects.using(about.using).create()
            since = dated[-1].since
            others.append(Name(identifier=text, customer=new, since=since, counter=new.pk, version=version))
        names.filter(identifier=text).delete()
        salt = new_salt()
        for number, name in enumerate(others):
            name.pk, name._state.adding = None, True
            name.since = name.since if number else 0
            name.until = others[number + 1].since if number + 1 < len(others) else None
            name.shard, name.salt = key_shard(f"account:{text}"), salt
        names.bulk_create(others)
        pseudonym = about.pseudonyms.account(text)
        names.create(
            identifier=pseudonym, customer=about.customer, shard=key_shard(f"account:{pseudonym}"), version=version
        )


def _has_used(about: About, name: Name) -> bool:
    """Return whether the customer of a name has it now, or ever had usage. Otherwise it needs no name of the past."""
    usage = PeriodUsage.objects.using(about.using).filter(customer=name.customer_id)
    return name.until is None or usage.exists()


def erase_configuration(about: About, by: Any = None, why: str = "") -> Changed:
    """Replace the names in the configuration and its history, in an edit. Return the changed rows.

    The history says that the user `by` did it, and `why`. Every process then reads all rows again, since tombstones do
    not name the keys any more.
    """
    using, changed = about.using, Changed()
    about.read_all()
    with editing(using) as edit, because(erased_because(about.customer, why)), keeping_terms():
        own = {model: _own_keys(about, model, column) for model, column, _texts in _KEYED}
        accounts = list(
            Account.objects.using(using).filter(identifier__in=[*about.texts_now, waiting_text(about.customer)])
        )
        for model, column, _texts in _KEYED:
            live = {f"account:{text}" for text in about.texts_now} | {f"account:{waiting_text(about.customer)}"}
            for row in model.objects.using(using).filter(**{f"{column}__in": live | own[model]}):
                _delete(row, by)
        belongs = {model: _belonging(about, model, column, own[model]) for model, column, _texts in _KEYED}
        of_accounts = list(about.account_records().values_list("pk", flat=True))
        erase_names(about, edit.version)
        for row in accounts:
            for channel in AlertChannel.objects.using(using).filter(account=row):
                _delete(channel, by)
            if row.identifier in about.texts:
                row.identifier = about.pseudonyms.account(row.identifier)
            row.name = ""
            _sign(row, by)
            row.save(using=using)
        for model, column, texts in _KEYED:
            changed[model._meta.model_name] = _scrub_history(about, model, belongs[model], column, texts)
        changed["account"] = _scrub_history(about, Account, of_accounts, "identifier", ("name",))
        _scrub_reasons(about)
        keys = {f"account:{text}" for text in about.texts}.union(*own.values())
        for tombstone in Tombstone.objects.using(using).filter(key__in=keys):
            tombstone.key = about.pseudonyms.key(tombstone.key)
            tombstone.save(using=using)
        ConfigVersion.require_full_read(using, edit.version)
    return changed


def _sign(row: Any, by: Any) -> None:
    """Let the history say that a person changes this row. Without a person, it has the user of the request."""
    if by is not None:
        row._history_user = by


def _delete(row: Any, by: Any) -> None:
    _sign(row, by)
    row.delete()


def rows_of(about: About) -> Changed:
    """Return the rows with records in the history that are about the customer."""
    found = Changed(account=set(about.account_records().values_list("id", flat=True)))
    for model, column, _texts in _KEYED:
        pks = _belonging(about, model, column, _own_keys(about, model, column))
        records: Any = model.history.using(about.using).filter(pk__in=pks)
        found[model._meta.model_name] = set(records.values_list("id", flat=True))
    return found


def _own_keys(about: About, model: Any, column: str) -> set[str]:
    """Return the keys in rows and records of a model that only this customer uses: its users and API keys."""
    records: Any = model.history.using(about.using)
    written = set(records.order_by().values_list(column, flat=True).distinct())
    written |= set(model.objects.using(about.using).order_by().values_list(column, flat=True).distinct())
    own = about.own_keys({key_name(key) for key in written})
    return {key for key in written if key_name(key) in own}


def _belonging(about: About, model: Any, column: str, own: set[str]) -> list[int]:
    """Return the primary keys of the history records that are about the customer."""
    keys = {f"account:{text}": text for text in about.texts}
    waiting = f"account:{waiting_text(about.customer)}"
    records: Any = model.history.using(about.using).filter(**{f"{column}__in": {*keys, *own, waiting}})
    return [
        pk
        for pk, key, version in records.values_list("pk", column, "version")
        if key in own or key == waiting or about.belongs(keys[key], version)
    ]


def _scrub_reasons(about: About) -> None:
    """Replace the names in the reasons of all edits, also of rows that are about other customers or about plans."""
    for model in versioned_models():
        records: Any = model.history.using(about.using)
        pks = {
            pk
            for word in about.scrub.searchable
            for pk in records.filter(history_change_reason__contains=word).values_list("pk", flat=True)
        }
        _scrub_history(about, model, sorted(pks), "", ())


def _scrub_history(about: About, model: Any, pks: list[int], column: str, texts: tuple[str, ...]) -> set[int]:
    """Replace the names in records of a model's history. Return the primary keys of the rows that they are about.

    `column` has the key of the row; "" to leave it as it is. `texts` are columns with texts that people wrote.
    """
    records, columns = model.history.using(about.using), record_columns(model)
    found: set[int] = set()
    for pk in pks:
        one = records.filter(pk=pk)
        before = record_digest(one.values_list(*columns).get())
        record = one.get()
        values: dict[str, Any] = {}
        key = getattr(record, column) if column else ""
        if column == "identifier":
            values[column] = about.account(key)
        elif column:
            values[column] = about.pseudonyms.key(key)
        for name in (*texts, "history_change_reason"):
            longest = record._meta.get_field(name).max_length
            value = getattr(record, name)
            values[name] = about.scrub.cut(value, longest) if value else value
        one.update(**values, history_salt=new_salt())
        erased.note(about.using, [(before, record_digest(one.all().values_list(*columns).get()))])
        found.add(record.id)
    return found
