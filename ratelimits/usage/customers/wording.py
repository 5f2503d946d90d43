"""Say in words, and as JSON, what a move would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.algorithms.base import amount
from ratelimits.conf import conf
from ratelimits.models import Access, Account, Customer, KeyOverride, Move
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.customers import waiting_text
from ratelimits.usage.customers.planning import MovedUsage, Planned, shown

#: Maximum number of texts of a customer that a sentence names.
_MAX_NAMED = 5
#: How usage is moved.
_ADJUSTED, _COUNTED_AGAIN = "adjusted", "counted again"


def named(customer: Customer | None, texts: Sequence[str]) -> str:
    """Return the token of a customer, with these account texts; "a new customer" for None."""
    if customer is None:
        return _("a new customer")
    return f"{customer.token} ({_listed(texts)})" if texts else _("%(token)s (no text now)") % {"token": customer.token}


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_MAX_NAMED]) + (", …" if len(texts) > _MAX_NAMED else "")


def title(planned: Planned) -> str:
    """Return what the move is, as the title of a page."""
    return _("Move %(text)s: %(kind)s") % {"text": planned.text, "kind": planned.kind.label}


def sentences(planned: Planned) -> Iterator[str]:
    """Yield sentences about the effect of a move."""
    own = [planned.text] if planned.has_text else []
    values = {
        "text": planned.text,
        "former": _former(planned),
        "customer": named(planned.customer, [*own, *planned.customer_texts]),
        "kept": _listed(planned.former_texts),
        "since": shown(planned.since),
        "asked": shown(planned.asked),
    }
    yield _kind_sentence(planned) % values
    yield from (sentence % values for sentence in _about_bills(planned))
    if not planned.has_text:
        yield _("Limits, overrides and blocks switch at once, when you confirm.")
        yield from _belongings(planned)
    if planned.counted_again:
        yield _("Open periods are counted again, as listed below.")


def _about_bills(planned: Planned) -> Iterator[str]:
    """Yield sentences that say whose bill has which usage of the text."""
    if planned.since > planned.asked:
        yield from _about_reports(planned)
    elif planned.asked:
        yield _("Bills: usage of %(text)s from %(asked)s on is this customer's.")
    else:
        yield _("Bills: all usage of %(text)s is this customer's.")
    if planned.asked:
        yield _("Usage of before %(asked)s stays with the customer who had the text then.")


def _former(planned: Planned) -> str:
    if planned.former is None:
        return _("nobody")
    has_text = bool(planned.names) and planned.names[-1].customer == planned.former.pk
    return named(planned.former, [planned.text, *planned.former_texts] if has_text else planned.former_texts)


def _kind_sentence(planned: Planned) -> str:
    if planned.has_text:
        return _("Customer %(customer)s has the text already, and now gets usage of before of customer %(former)s.")
    if planned.kind == Move.Kind.RENAME:
        if planned.is_unused:
            return _(
                "Rename: customer %(customer)s gets the new text %(text)s. Other texts of the customer stay its own"
                " until you move them to somebody else."
            )
        if planned.customer_texts:
            return _(
                "Rename: customer %(customer)s gets the text %(text)s, which was used already, but has no account and"
                " no report yet. Other texts of the customer stay its own until you move them to somebody else."
            )
        return _("Rename: customer %(customer)s gets the text %(text)s of customer %(former)s.")
    if planned.kind == Move.Kind.SWAP:
        return _("Swap: customer %(former)s has got a text of customer %(customer)s, who now gets %(text)s in return.")
    if planned.kind == Move.Kind.MERGE:
        return _(
            "Merge: %(text)s is the only text of customer %(former)s, and goes to customer %(customer)s, who gets one"
            " bill for all texts. For a swap, move a text of this customer the other way afterwards."
        )
    if planned.kind == Move.Kind.SPLIT:
        return _("Split: %(text)s goes from customer %(former)s, who keeps %(kept)s, to %(customer)s.")
    if planned.kind == Move.Kind.REUSE and planned.former_texts:
        return _("Reuse: %(text)s, a former name of customer %(former)s, goes to %(customer)s.")
    if planned.kind == Move.Kind.REUSE:
        return _(
            "Reuse: %(text)s goes from customer %(former)s to %(customer)s. The former customer keeps its bills of"
            " before, and has no text until it gets one."
        )
    return _("%(text)s goes from customer %(former)s, who keeps %(kept)s, to customer %(customer)s.")


def _belongings(planned: Planned) -> Iterator[str]:
    """Yield sentences about the rows that stay with the former customer, and about the terms of the customer."""
    key = f"account:{planned.text}"
    count = sum(
        model.objects.using(planned.using).filter(**{column: key}).count()
        for model, column in ((KeyOverride, "key"), (Access, "target"))
    )
    if count:
        text = ngettext(
            "%(count)d override, block or allow of %(key)s stays with its former customer.",
            "%(count)d overrides, blocks and allows of %(key)s stay with their former customer.",
            count,
        )
        yield text % {"count": count, "key": key}
    row = None if planned.customer is None else _row_of(planned.using, planned.customer)
    values = {
        "text": planned.text,
        "plan": _("no plan") if row is None or row.plan is None else row.plan,
        "zone": "UTC" if row is None else row.timezone,
    }
    yield _("%(text)s then has the plan and the terms of the customer: %(plan)s, %(zone)s.") % values


def _row_of(using: str, customer: Customer) -> Account | None:
    """Return the row with the plan and the terms of a customer; None without one."""
    text = waiting_text(customer)  # stands for the customer, also if it has a text
    return accounts_now(using, [text]).get(text)


def _about_reports(planned: Planned) -> Iterator[str]:
    yield _("Reports have usage of %(text)s or of the customer up to %(since)s, and reports never change.")
    if not planned.adjusted:
        yield _("There is no usage of %(text)s from %(asked)s until then, so nothing must be adjusted.")
    else:
        yield _(
            "So usage from %(asked)s until then is moved by adjustments, as listed below: they take it off the former"
            " customer and give it to the customer, in new versions of reports."
        )
        if conf.ADJUSTMENT_APPROVAL:
            yield _("Another person must approve these adjustments.")
    if planned.changes_names:
        yield _("Usage of %(text)s from %(since)s on is counted for this customer.")
    else:
        yield _("The customer has %(text)s from %(since)s on already, so only adjustments are made.")


def warnings(planned: Planned) -> Iterator[str]:
    """Yield warnings about a text that nobody has used, a plan that is left, and usage of before that stays behind."""
    yield from _about_opposite(planned)
    yield from _about_staying(planned)
    if planned.is_unused:
        yield (
            _("Nobody has used %(text)s yet, and no account has this identifier: check the spelling.")
            % {"text": planned.text}
        )


def _about_opposite(planned: Planned) -> Iterator[str]:
    """Yield a warning if the text goes from a customer with a plan to one who has none: perhaps a rename was meant."""
    if planned.has_text or planned.former is None or planned.customer is None or not planned.customer_texts:
        return
    loses, gets = _row_of(planned.using, planned.former), _row_of(planned.using, planned.customer)
    if loses is not None and loses.plan is not None and (gets is None or gets.plan is None):
        values = {"text": planned.text, "plan": loses.plan, "other": planned.customer_texts[0]}
        yield (
            _(
                "%(text)s has the plan %(plan)s now, and has none afterwards. If %(other)s is the new name of this"
                " customer, do the opposite: move %(other)s to the customer of %(text)s."
            )
            % values
        )


def _about_staying(planned: Planned) -> Iterator[str]:
    """Yield sentences about the usage of before the move that stays with its customers, and how it would go along."""
    usage = planned.staying
    customers = Customer.objects.using(planned.using).in_bulk({one.former for one in usage})
    for former in sorted({one.former for one in usage}):
        owner = customers.get(former)
        values = {
            "text": planned.text,
            "asked": shown(planned.asked),
            "usage": ", ".join(amount(one.units, one.meter) for one in usage if one.former == former),
            "former": _("a new customer") if owner is None else _("customer %s") % owner.token,
        }
        yield (_("Usage of %(text)s of before %(asked)s in open periods stays with %(former)s: %(usage)s.") % values)
        row = None if owner is None else _row_of(planned.using, owner)
        if row is None or row.plan is None:
            yield _("This customer has no plan, so nobody pays for this usage.")
    if usage:
        yield _(
            "It goes along if you choose “since its first usage” (in the command: --since beginning), or %(first)s."
        ) % {"first": shown(min(one.first for one in usage))}


def heads() -> list[str]:
    """Return the heads of the table of `rows`."""
    return [_("how"), _("meter"), _("units"), _("from customer"), _("period"), _("to customer"), _("period")]


def rows(planned: Planned) -> list[tuple[str, ...]]:
    """Return a row of texts for each part of the usage that goes from one customer to another."""
    tokens = _tokens(planned)
    to = planned.customer.token if planned.customer is not None else _("new")
    return [
        (
            _("adjusted") if how == _ADJUSTED else _("counted again"),
            usage.meter,
            f"{usage.units:,}",
            tokens.get(usage.former, _("nobody")),
            usage.period.name,
            to,
            usage.to_period.name,
        )
        for how, usage in _moved(planned)
    ]


def _moved(planned: Planned) -> list[tuple[str, MovedUsage]]:
    """Return the usage that a move moves, and how."""
    return [
        *((_ADJUSTED, usage) for usage in planned.adjusted),
        *((_COUNTED_AGAIN, usage) for usage in planned.counted_again),
    ]


def _tokens(planned: Planned) -> dict[int, str]:
    formers = {usage.former for _how, usage in _moved(planned)} | {usage.former for usage in planned.staying}
    customers = Customer.objects.using(planned.using).filter(pk__in=formers)
    return dict(customers.values_list("pk", "token"))


def as_json(planned: Planned) -> dict[str, Any]:
    """Return what the move would do, for programs. Moments are in ISO 8601, in UTC."""
    tokens = _tokens(planned)
    return {
        "text": planned.text,
        "kind": planned.kind.value,
        "former": None if planned.former is None else planned.former.token,
        "customer": None if planned.customer is None else planned.customer.token,
        "asked": _iso(planned.asked),
        "since": _iso(planned.since),
        "changes_nothing": planned.changes_nothing,
        "usage": [
            {
                "how": how,
                "meter": usage.meter,
                "units": usage.units,
                "former": tokens.get(usage.former),
                "period": usage.period.name,
                "to_period": usage.to_period.name,
            }
            for how, usage in _moved(planned)
        ],
        "staying": [
            {
                "former": tokens.get(usage.former),
                "meter": usage.meter,
                "units": usage.units,
                "first": _iso(usage.first),
            }
            for usage in planned.staying
        ],
    }


def _iso(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
