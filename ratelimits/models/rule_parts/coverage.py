"""The fields of a rule that say which requests it covers, and by which key it counts them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.models.fields.scopes import SCOPE, names_in
from ratelimits.models.fields.view_key_texts import LONGEST_SOURCE, source_of
from ratelimits.models.keys import KeyKind, validate_source


class Callers(models.TextChoices):
    """The callers to whom a rule applies. A caller with a user or an API key is authenticated."""

    EVERYONE = "everyone", _("everyone")
    ANONYMOUS = "anonymous", _("anonymous callers")
    AUTHENTICATED = "authenticated", _("authenticated callers")


def _prefix_field(label: Any, longest: int, help_text: Any) -> models.PositiveSmallIntegerField[Any, Any]:
    """Return an optional field for a prefix length from 1 to `longest`."""
    validators = [MinValueValidator(1), MaxValueValidator(longest)]
    return models.PositiveSmallIntegerField(label, null=True, blank=True, validators=validators, help_text=help_text)


class Coverage(models.Model):
    """The part of a rule that says which requests it covers, and by which key it counts them."""

    scope = models.CharField(
        _("scope"),
        max_length=100,
        default="*",
        validators=[
            RegexValidator(
                rf"\A(?:{SCOPE.pattern})\Z",
                _(
                    "Write * for every request, a throttle_scope such as search, or a scope and methods:"
                    " search:POST,PUT."
                ),
            )
        ],
        help_text=_("* for every request, a throttle_scope such as search, or a scope and methods: search:POST."),
    )
    except_scopes = models.CharField(
        _("except in scopes"),
        max_length=2000,
        blank=True,
        help_text=_(
            "Scopes in which a rule for * does not apply, separated by commas or spaces, such as health, webhooks."
        ),
    )
    callers = models.CharField(_("callers"), max_length=13, choices=Callers.choices, default=Callers.EVERYONE)
    group = models.CharField(
        _("group"),
        max_length=150,
        blank=True,
        help_text=_("Name of a group of users. The rule then applies only to its members."),
    )
    key_kind = models.CharField(
        _("counted per"),
        max_length=10,
        choices=KeyKind.choices,
        default=KeyKind.CALLER,
        help_text=_(
            "A request without a user is not limited by a rule per user. The same is true of API keys and accounts."
        ),
    )
    view_key = models.CharField(
        _("key of the view"),
        max_length=LONGEST_SOURCE,
        blank=True,
        validators=[validate_source],
        help_text=_(
            "Only for rules per key that the view gives: which key, such as header:X-Tenant or arg:pk. Leave it empty"
            " for the first key of each view."
        ),
    )
    ipv4_prefix = _prefix_field(
        _("IPv4 prefix"),
        IPV4_PREFIX,
        _(
            "Length of the prefix by which IPv4 addresses are counted, such as 24. Leave it empty to count each"
            " address."
        ),
    )
    ipv6_prefix = _prefix_field(
        _("IPv6 prefix"),
        IPV6_PREFIX,
        _("Length of the prefix by which IPv6 addresses are counted, such as 56. Leave it empty for 64."),
    )

    class Meta:
        abstract = True

    def coverage_problem(self) -> str:
        """Return the reason why no decision can use these fields; "" if they are valid.

        Rows can be invalid because raw SQL can write any values.
        """
        if self.key_kind not in KeyKind.values:
            return f"unknown key_kind {self.key_kind!r}: use one of {', '.join(KeyKind.values)}"
        if not SCOPE.fullmatch(self.scope):
            return f"scope {self.scope!r} is not valid: use *, a scope such as search, or search:POST,PUT"
        if self.callers not in Callers.values:
            return f"unknown callers {self.callers!r}: use one of {', '.join(Callers.values)}"
        try:
            self.canonical_view_key()
        except ValueError as error:
            return f"view_key: {error}"
        for name, longest in (("ipv4_prefix", IPV4_PREFIX), ("ipv6_prefix", IPV6_PREFIX)):
            length = getattr(self, name)
            if length is not None and not 1 <= length <= longest:
                return f"{name} must be from 1 to {longest}, not {length}"
        return ""

    def clean(self) -> None:
        """Write the list of scopes and the key of the view in one form, so that equal values are equal texts."""
        self.except_scopes = ", ".join(names_in(self.except_scopes))
        with suppress(ValueError):  # The validation of the field reports this text.
            self.view_key = self.canonical_view_key()

    def canonical_view_key(self) -> str:
        """Return the one text for the key of the view. Raise ValueError if the text is not valid."""
        return source_of(self.view_key).text if self.view_key else ""
