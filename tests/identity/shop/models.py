"""Models with the shape of pretix's: team tokens, devices and OAuth access tokens. And clients of an MCP server."""

from __future__ import annotations

from typing import Any, ClassVar

from django.conf import settings
from django.db import models


class Row(models.Model):
    #: mypy knows the managers of installed apps alone.
    objects: ClassVar[models.Manager[Any]]

    class Meta:
        abstract = True


class Organizer(Row):
    slug = models.SlugField(unique=True)

    def __str__(self) -> str:
        return self.slug


class Team(Row):
    organizer = models.ForeignKey(Organizer, models.CASCADE)

    def __str__(self) -> str:
        return f"team {self.pk}"


class TeamAPIToken(Row):
    team = models.ForeignKey(Team, models.CASCADE)
    token = models.CharField(max_length=64, unique=True)

    def __str__(self) -> str:
        return f"token {self.pk}"


class Device(Row):
    organizer = models.ForeignKey(Organizer, models.CASCADE)
    api_token = models.CharField(max_length=64, unique=True)

    def __str__(self) -> str:
        return f"device {self.pk}"


class OAuthApplication(Row):
    name = models.CharField(max_length=255)

    def __str__(self) -> str:
        return self.name


class OAuthAccessToken(Row):
    application = models.ForeignKey(OAuthApplication, models.CASCADE)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE)
    organizers = models.ManyToManyField(Organizer)
    token = models.CharField(max_length=64, unique=True)

    def __str__(self) -> str:
        return f"access token {self.pk}"


class Client(Row):
    token = models.CharField(max_length=64, unique=True)

    def __str__(self) -> str:
        return f"client {self.pk}"
