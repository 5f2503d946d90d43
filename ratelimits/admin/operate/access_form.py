"""The form of a block or an allow. The form also accepts a name, and finds the key that has this name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.models import Access
from ratelimits.models.access.targets import canonical
from ratelimits.models.keys import COVERS
from ratelimits.status.keys import KnownKey, looks_secret

if TYPE_CHECKING:
    _Base = forms.ModelForm[Access]
else:
    _Base = forms.ModelForm

#: Maximum number of keys that an error lists.
_MAX_LISTED = 20
#: Name of the field for a length of time. The table has no such column: the form calculates the end from the length.
LASTS = "lasts"


class AccessForm(_Base):
    """A form of a block or an allow. `search` returns the keys that contain a text, or whose name contains it."""

    search: Callable[[str], list[KnownKey]]
    lasts = forms.TypedChoiceField(
        label=gettext_lazy("For how long"),
        required=False,
        coerce=int,
        empty_value="",
        choices=[
            ("", gettext_lazy("until the moment below")),
            ("3600", gettext_lazy("for an hour")),
            ("86400", gettext_lazy("for a day")),
            ("604800", gettext_lazy("for a week")),
        ],
        help_text=gettext_lazy("Counted from now. If the block or allow starts later: counted from its start."),
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        if "target" in self.fields:
            self.fields["target"].help_text = gettext_lazy(
                "A name of a customer, user or API key; a part of such a name; a whole key, such as user:42; or an"
                " address or network, such as 203.0.113.0/24."
            )

    def clean_target(self) -> str:
        """Return the key that the typed text names. Raise ValidationError if the text names no key or several keys."""
        text: str = self.cleaned_data["target"].strip()
        try:
            return canonical(text)
        except ValidationError as error:
            # Return three kinds of text unchanged, so that the model's validation says what is wrong with them: a wrong
            # network, a text that begins like a key (such as "user:"), and an unprintable text.
            if error.code != "key" or text.partition(":")[0] in COVERS or not text.isprintable():
                return text
        found = type(self).search(text)
        if len(found) == 1:
            return found[0].key
        if found:
            listed = ", ".join(f"{one.key} ({one.name})" if one.name else one.key for one in found[:_MAX_LISTED])
            more = ", …" if len(found) > _MAX_LISTED else ""
            raise ValidationError(
                _("Which key do you mean? Write one of these keys: %(keys)s") % {"keys": listed + more}
            )
        if looks_secret(text):
            raise ValidationError(_("This looks like a secret. Search for the name of the key instead."))
        problem = _(
            "No key or name that you may view contains “%(text)s”. Write a shorter text, or the whole key, such as"
            " user:42."
        )
        raise ValidationError(problem % {"text": text})

    def clean(self) -> dict[str, Any]:
        """Calculate the end from the length of time. Refuse a length of time if the user has also typed an end."""
        data: dict[str, Any] = super().clean() or {}
        seconds = data.get(LASTS)
        if not seconds:
            return data
        if data.get("valid_until") is not None and "valid_until" in self.changed_data:
            self.add_error(LASTS, _("Choose a length of time, or write an end, but not both."))
        else:
            now = moments.now()
            data["valid_until"] = max(data.get("valid_from") or now, now) + timedelta(seconds=seconds)
        return data
