"""The groups of users, for rules that apply only to the members of a group.

The groups of a user are read when the user is first seen, and only if a rule names a group. They stay in memory until
they change. A change of the members of a group is an edit of the configuration, just like a change of a rule. This edit
adds a tombstone (a row of the table `Tombstone`) for each user whose groups must be read again. A tombstone without a
user stands for all users.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import models, router, transaction
from django.db.models.signals import m2m_changed, post_delete, post_save

from ratelimits.conf import conf
from ratelimits.models.rules import Rule
from ratelimits.models.users import groups_field, user_pk
from ratelimits.models.versions import Tombstone, editing

#: The names of the groups of users, by the user's key, such as "user:42".
Groups = dict[str, frozenset[str]]
#: Maximum number of users whose groups a process keeps. When it is reached, the groups of all users are forgotten.
MAX_USERS = 100_000
#: Maximum number of tombstones for one change. A change of more users makes processes read the groups of all users.
_MAX_TOMBSTONES = 100
#: Maximum number of users that one query names.
_CHUNK = 500

#: Whether some rules in force are not in the database. Only tests have such rules. Such a rule can name a group. So
#: changes of groups are then noted even if no rule in the database names a group.
has_rules_outside_database = False


@dataclass(frozen=True, slots=True)
class Memberships:
    """The table of the members of groups.

    model    the model of this table
    groups   the model of the groups
    user     the name of the model's field for the user
    group    the name of the model's field for the group
    using    the alias of the table's database
    """

    model: Any
    groups: type[models.Model]
    user: str
    group: str
    using: str

    def names(self, users: Iterable[Any]) -> Iterator[tuple[Any, str]]:
        """Yield the primary key of a user and the name of a group, for each group of these users.

        `users` are primary keys.
        """
        pks = list(users)
        rows = self.model._base_manager.using(self.using).order_by()
        for first in range(0, len(pks), _CHUNK):
            chosen = rows.filter(**{f"{self.user}__in": pks[first : first + _CHUNK]})
            yield from chosen.values_list(self.user, f"{self.group}__name").iterator()


def memberships() -> Memberships | None:
    """Return the table of the members of groups; None if the project's users have no groups."""
    field = groups_field()
    if field is None:
        return None
    model = field.remote_field.through
    # Read from the database to which Django writes: a replica may not have the newest change yet.
    using = router.db_for_write(model)
    return Memberships(model, field.related_model, field.m2m_field_name(), field.m2m_reverse_field_name(), using)


def database() -> str | None:
    """Return the alias of the database that has the members of groups; None if the project's users have no groups."""
    table = memberships()
    return None if table is None else table.using


def read(users: Collection[str]) -> Groups:
    """Return the groups of these users. Each item of `users` is a key, such as "user:42"."""
    table = memberships()
    names: dict[str, set[str]] = defaultdict(set)
    if table is not None:
        pks = {key: user_pk(key.partition(":")[2]) for key in users}
        key_of_pk = {pk: key for key, pk in pks.items() if pk is not None}
        for pk, name in table.names(key_of_pk):
            names[key_of_pk[pk]].add(name)
    return {user: frozenset(names[user]) for user in users}


def unchanged(current: Groups, tombstones: Iterable[Tombstone]) -> Groups:
    """Return the groups of the users that no tombstone concerns. A tombstone without a key concerns all users."""
    changed = {tombstone.key for tombstone in tombstones if tombstone.kind == "group"}
    if not changed:
        return current
    return {} if "" in changed else {user: names for user, names in current.items() if user not in changed}


def watch() -> None:
    """Connect the signals of groups and their members. Call this when all models are known."""
    table = memberships()
    if table is None:
        return
    m2m_changed.connect(_members_changed, sender=table.model, dispatch_uid="ratelimits.groups")
    post_save.connect(_group_saved, sender=table.groups, dispatch_uid="ratelimits.groups")
    post_delete.connect(_group_deleted, sender=table.groups, dispatch_uid="ratelimits.groups")


def _members_changed(instance: Any, action: str, reverse: bool, pk_set: Any, using: str, **kwargs: Any) -> None:
    # If `reverse` is true, `instance` is a group and `pk_set` are its users. Otherwise `instance` is a user.
    if action == "post_clear":
        _groups_changed([] if reverse else [instance.pk], using)
    elif action in ("post_add", "post_remove") and pk_set:
        _groups_changed(list(pk_set) if reverse else [instance.pk], using)


def _group_saved(created: bool, using: str, **kwargs: Any) -> None:
    if not created:  # The group can have another name now. A new group has no members yet.
        _groups_changed([], using)


def _group_deleted(using: str, **kwargs: Any) -> None:
    _groups_changed([], using)


def _groups_changed(users: Collection[Any], using: str) -> None:
    """Make every process read the groups of these users again, or of all users if the list is empty."""
    if using == conf.DATABASE:
        _write_tombstones(users)
    else:
        # No transaction can contain the tables of two databases. So edit only after the group's change is committed.
        transaction.on_commit(lambda: _write_tombstones(users), using=using)


def _write_tombstones(users: Collection[Any]) -> None:
    """Write a tombstone for each of these users. If there are none or too many, write one tombstone for all users.

    Write nothing if no rule names a group.
    """
    if not has_rules_outside_database and not Rule.objects.using(conf.DATABASE).exclude(group="").exists():
        return
    keys = [f"user:{pk}" for pk in users]
    # The name of a user with a text as its primary key can differ from this text.
    if not keys or len(keys) > _MAX_TOMBSTONES or not all(isinstance(pk, (int, UUID)) for pk in users):
        keys = [""]
    with editing(conf.DATABASE) as edit:
        Tombstone.objects.using(conf.DATABASE).bulk_create(
            Tombstone(kind="group", row=0, key=key, version=edit.version, since=edit.since) for key in keys
        )
