"""Tables of a project that refer to accounts by their identifier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db import connection, models

from ratelimits.models import Account


@contextmanager
def contracts() -> Iterator[tuple[Any, Any]]:
    """Have two models of the project, with their tables. Yield them.

    A contract refers to an account by its identifier. A group of accounts does so too, by the rows of a many-to-many
    relation: yield the model of these rows.
    """

    class Contract(models.Model):  # noqa: DJ008
        account = models.ForeignKey(Account, models.CASCADE, to_field="identifier", related_name="+")
        # These are not constraints on the identifier.
        payer = models.ForeignKey(Account, models.CASCADE, null=True, related_name="+")
        former = models.ForeignKey(
            Account, models.DO_NOTHING, to_field="identifier", null=True, related_name="+", db_constraint=False
        )

        class Meta:
            app_label = "project"

    class AccountGroup(models.Model):  # noqa: DJ008
        accounts = models.ManyToManyField(Account, through="GroupedAccount", related_name="+")

        class Meta:
            app_label = "project"

    class GroupedAccount(models.Model):  # noqa: DJ008
        group = models.ForeignKey(AccountGroup, models.CASCADE)
        member = models.OneToOneField(Account, models.CASCADE, to_field="identifier", related_name="+")

        class Meta:
            app_label = "project"

    made = (Contract, AccountGroup, GroupedAccount)
    try:
        with connection.schema_editor() as editor:
            for model in made:
                editor.create_model(model)
        yield Contract, GroupedAccount
    finally:
        with connection.schema_editor() as editor:
            for model in reversed(made):
                editor.delete_model(model)
        for model in made:
            del apps.all_models["project"][str(model._meta.model_name)]
        apps.clear_cache()
