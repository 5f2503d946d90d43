"""Find the person whom an option of a command names."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import CommandError


def author(name: str | None) -> Any:
    """Return the user with this user name; None for no name. Raise CommandError if there is no such user."""
    if name is None:
        return None
    users: Any = get_user_model()
    user = users._default_manager.filter(**{users.USERNAME_FIELD: name}).first()
    if user is None:
        raise CommandError(f"There is no user “{name}”: write the user name of the person who decided this.")
    return user
