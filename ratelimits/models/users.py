"""Look for users, and handle the deletion of users. Users can be in another database than the app's tables.

When a user is deleted, Django's own `on_delete` handlers search the user's database for rows that name the user. The
handlers of this module search the database of the app's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured, ValidationError
from django.db import models, router

from ratelimits.conf import conf
from ratelimits.naming import text_of


def protect(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Raise ProtectedError if a row names the user who is being deleted."""
    rows = _rows(field, sub_objs, using)
    if rows:
        models.PROTECT(collector, field, rows, using)


def set_null(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Set the column to null in rows that name the user who is being deleted."""
    models.SET_NULL(collector, field, _rows(field, sub_objs, using), using)


# With this flag Django passes the rows as a query that has not run yet.
protect.lazy_sub_objs = set_null.lazy_sub_objs = True  # type: ignore[attr-defined]


def _rows(field: Any, rows: Any, using: str) -> Any:
    """Return the query for the rows that name the user. It runs in the database that contains these rows."""
    if using != router.db_for_write(field.remote_field.model):
        # The user is deleted from a database to which users are not written. So it is a copy of a user, and rows that
        # name the copy are in the same database as the copy.
        return rows
    # The admin's query also joins the users. No query can join tables of two databases.
    return rows.using(conf.DATABASE).select_related(None)


def groups_field() -> Any:
    """Return the field `groups` of the user model; None if the project's users have no groups with names.

    Do not import Django's own model of groups: only a project with django.contrib.auth can do so.
    """
    with suppress(FieldDoesNotExist, ImproperlyConfigured):  # `manage.py check` reports a project without users.
        field: Any = get_user_model()._meta.get_field("groups")
        if field.many_to_many and field.related_model._meta.get_field("name"):
            return field
    return None


def user_pk(name: str) -> Any:
    """Return the primary key of the user with this name, such as "42"; None if no row of the user model has the name.

    Requests of user 7 have the key user:7. No request has a key with another spelling, such as user:07.
    """
    users, text = _model_and_pk(name)
    if users is not get_user_model() or name.startswith("~"):  # a row of another model, or a digest
        return None
    with suppress(ValidationError):
        validate_storable(text)
        pk = users._meta.pk.to_python(text)
        users._meta.pk.run_validators(pk)  # A number can be too large for the database.
        return pk if str(pk) == text else None
    return None


def validate_storable(text: str) -> None:
    """Raise ValidationError for a text that no database has: with NUL, or with half of a surrogate pair."""
    if "\0" in text or (not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)):
        raise ValidationError("This text cannot be stored.")


def existing_users(names: Iterable[str]) -> set[str]:
    """Return the names that are primary keys of users, or names of existing rows such as "shop.customer:42"."""
    pks_of: dict[Any, dict[Any, str]] = defaultdict(dict)
    for name in names:
        users, text = _model_and_pk(name)
        with suppress(ValidationError):
            validate_storable(text)
            pk = users._meta.pk.to_python(text)
            users._meta.pk.run_validators(pk)  # A number can be too large for the database.
            # Requests of user 7 have the key user:7. No request has a key with another spelling, such as user:07.
            if str(pk) == text:
                pks_of[users][pk] = name
    return {
        pks[pk]
        for users, pks in pks_of.items()
        for pk in users._base_manager.filter(pk__in=list(pks)).values_list("pk", flat=True)
    }


def accounts_without_rows(names: Iterable[str]) -> set[str]:
    """Return the names of accounts that exist, or perhaps exist, although the table of accounts has no row for them.

    These are users, API keys, rows of models such as "shop.tenant:7", and rows of ACCOUNT_MODEL.
    """
    found, rows = set(), {}
    for name in names:
        kind, _colon, rest = name.partition(":")
        if kind == "api_key":
            found.add(name)
        elif kind == "user":
            rows[rest] = name
        elif conf.ACCOUNT is None or "." in kind:
            rows[name] = name
        elif conf.ACCOUNT_MODEL is not None:
            rows[f"{conf.ACCOUNT_MODEL.lower()}:{name}"] = name
    return found | {rows[row] for row in existing_users(rows)}


def _model_and_pk(name: str) -> tuple[Any, str]:
    """Return the model that a user's name contains, or else the user model, and the primary key as a text."""
    label, colon, pk = name.partition(":")
    if colon and label.count(".") == 1:
        with suppress(LookupError):
            return apps.get_model(label), text_of(pk)
    return get_user_model(), text_of(name)
