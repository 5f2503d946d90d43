"""A user that needs no other app of Django."""

from __future__ import annotations

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.db import models


class Person(AbstractBaseUser):
    """A user with a name, and without groups and permissions."""

    name = models.CharField(max_length=100, unique=True)
    USERNAME_FIELD = "name"
    objects = BaseUserManager()
