"""The form that asks for the key to which a page applies."""

from __future__ import annotations

from django import forms
from django.utils.translation import gettext_lazy

#: Maximum number of characters of a searched text. No key is longer.
MAX_TEXT = 300


class KeyForm(forms.Form):
    """A form that asks for a key, and for its account if the account is not clear."""

    required_css_class = "required"
    key = forms.CharField(
        label=gettext_lazy("For whom"),
        max_length=MAX_TEXT,
        help_text=gettext_lazy(
            "A name of a customer, user or API key; a part of such a name; or a whole key, such as user:42."
        ),
    )
    account = forms.CharField(
        label=gettext_lazy("Account"),
        max_length=MAX_TEXT,
        required=False,
        help_text=gettext_lazy(
            "Only for a user or API key with several accounts or an unknown account. If the key has no account, write a"
            " hyphen (-)."
        ),
    )
