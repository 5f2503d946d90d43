"""The inspector's table of rules: each rule as a sentence, why it applies, and how many permits are left."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from django.db.models import Q
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.admin.operate.offered import explained_sentence
from ratelimits.algorithms.base import number
from ratelimits.algorithms.limits import Mode, fields_of
from ratelimits.conf import conf
from ratelimits.identity import Identity
from ratelimits.models import KeyOverride, PlanMembership
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.fields import view_key_texts
from ratelimits.moments import when
from ratelimits.quota.standings import LiveLimit
from ratelimits.rules import AppliedRule, UnreadableRule
from ratelimits.rules.access import AccessRow
from ratelimits.rules.keyed import NEVER, OverrideRow
from ratelimits.rules.selection import GLOBAL_KEY
from ratelimits.status.operating import NO_ACCOUNT


class Pages(NamedTuple):
    """The URLs of pages. A URL is "" if the user may not open the page.

    `rule`, `override`, `membership` and `account` have "{}" in place of the primary key.
    """

    rule: str = ""
    override: str = ""
    membership: str = ""
    account: str = ""
    reset: str = ""
    grant: str = ""
    inspect: str = ""


#: The HTML of a row, for the values that `_Table.row` returns. These values are HTML already. For a thousand rows, a
#: template would take ten times as long.
_ROW = (
    '<tr{}><th scope="row"><a href="{}">{}</a><br>{}{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>'
    "<td>{}{}</td></tr>"
)
_NOTHING = SafeString("")
#: The attribute of a row whose rule refuses now.
_REFUSES = SafeString(' class="ratelimits-refuses"')


def shown_limits(
    limits: Iterable[LiveLimit],
    identity: Identity,
    plans: Mapping[int, str],
    pages: Pages,
    access: AccessRow | None = None,
    key: str = "",
) -> SafeString:
    """Return the rows of the table, as HTML.

    The rules that refuse now come first, and then the rules with the smallest share of permits left. This makes at most
    3 queries, for any number of rules. `access` is the block or allow that decides before any rule. `key` is the key
    that the page is about.
    """
    table = _Table(identity, plans, pages, access, key)
    by_urgency = sorted(((limit, _permits(limit)) for limit in limits), key=lambda pair: _urgency(*pair))
    return SafeString("\n".join(_ROW.format(*table.row(limit, permits)) for limit, permits in by_urgency))


def _permits(limit: LiveLimit) -> int:
    """Return the number of permits that a rule has while none is used; 0 for a rule that does not apply."""
    rule = limit.why.rule
    if not isinstance(rule, AppliedRule):
        return 0
    permits, _span = rule.algorithm.quota
    return permits


def _urgency(limit: LiveLimit, permits: int) -> tuple[int, float, str]:
    """Return the value by which rules are sorted.

    Refusing rules come first, and then rules with a small share of permits left. Rules without a standing come last:
    they are off or cannot be read, or Redis did not answer.
    """
    standing, name = limit.standing, limit.why.row.name
    if standing is None:
        return 1, 2.0, name  # No share of permits is greater than 1.
    return int(standing.allowed), standing.remaining / (permits or 1), name


class _Table:
    """Makes the rows of the table. Data that several rows need is read only once."""

    def __init__(
        self,
        identity: Identity,
        plans: Mapping[int, str],
        pages: Pages,
        access: AccessRow | None = None,
        key: str = "",
    ) -> None:
        using = conf.DATABASE
        keys = [one for one in {identity.api_key, identity.user, identity.address, identity.account, key} if one]
        self._key = key
        self._identity, self._plans, self._pages = identity, plans, pages
        overrides = KeyOverride.objects.using(using).filter(key__in=keys) if pages.override else []
        self._reasons = {override.pk: override.reason for override in overrides}
        memberships = _memberships(keys) if pages.membership else []
        self._membership_urls = {plan: pages.membership.format(pk) for plan, pk in memberships}
        self._account_url = ""
        if pages.account and identity.account_id:
            accounts = accounts_now(using, [identity.account_id]).values()
            self._account_url = next((pages.account.format(row.pk) for row in accounts), "")
        # Translate once for all rows, because looking up a translation takes time.
        self._default, self._full, self._admits = _html(_("default rule")), _html(_("full")), _html(_("admits"))
        # If a block or allow decides before any rule, the answer of each rule begins with this text.
        self._answer_prefix = ""
        if access is not None:
            self._answer_prefix = _html(_("the block refuses") if access.blocks else _("the allow admits")) + "; "
            self._answer_prefix += _html(_("this rule alone:")) + " "
        self._shadow = format_html("<br><em>{}</em>", _("shadow: refuses nobody"))
        self._reset, self._grant = _html(_("Reset")), _html(_("Give more"))
        self._rule_url, self._reset_url, self._grant_url = _html(pages.rule), _html(pages.reset), _html(pages.grant)
        # Caches of the links to keys, and of the beginnings of query strings, by key.
        self._key_links: dict[str, SafeString] = {}
        self._queries: dict[str, SafeString] = {}

    def row(self, limit: LiveLimit, permits: int) -> tuple[SafeString, ...]:
        """Return the values of a row, in the order of `_ROW`.

        All values are safe HTML: they are numbers, or texts that `_html` or Django has escaped.
        """
        row, rule, standing, key = limit.why.row, limit.why.rule, limit.standing, limit.key
        name, permits_left, full_again_in = _html(row.name), _NOTHING, _NOTHING
        reset = grant = _NOTHING
        if isinstance(rule, AppliedRule):
            if key != GLOBAL_KEY:
                query = self._queries.get(key) or self._query(key)
                reset = _action(self._reset, name, self._reset_url + query) if self._reset_url else reset
                if self._grant_url and "capacity" in fields_of(rule.algorithm.id):
                    grant = _action(self._grant, name, self._grant_url + query)
            if standing is not None:
                permits_left = SafeString(f"{standing.remaining:,} / {permits:,}")
                full_again_in = _html(duration(standing.reset_after)) if standing.reset_after > 0 else self._full
        admits = standing is not None and standing.allowed
        return (
            _REFUSES if standing is not None and not admits else _NOTHING,
            SafeString(self._rule_url.format(row.pk)),
            name,
            _html(explained_sentence(limit.why)),
            self._shadow if isinstance(rule, AppliedRule) and rule.mode is Mode.SHADOW else _NOTHING,
            self._why(limit),
            self._key_links.get(key) or self._key_link(key),
            permits_left,
            full_again_in,
            SafeString(self._answer_prefix + (self._admits if admits else _html(_next_request(limit)))),
            reset,
            grant,
        )

    def _key_link(self, key: str) -> SafeString:
        """Return a key with a link to its page in the inspector.

        These get no link: `global`, the address of the inspected identity, and the key that the page is about.
        """
        without_link = ("", GLOBAL_KEY, self._key, self._identity.narrowest_key, self._identity.address)
        is_this_page = key == self._identity.account and self._identity.narrowest_key is None
        linked = bool(self._pages.inspect) and key not in without_link and not is_this_page
        link = self._key_links[key] = _linked(key, f"{self._pages.inspect}?{urlencode({'q': key})}" if linked else "")
        return link

    def _query(self, key: str) -> SafeString:
        """Return, as HTML, the beginning of a form's query string (`?key=…&rule=`). Callers append a rule's name."""
        needs_account = not key.startswith(("ip:", "account:")) and not view_key_texts.is_text(key)
        query = {"key": key} | ({"account": self._identity.account_id or NO_ACCOUNT} if needs_account else {})
        self._queries[key] = _html(f"?{urlencode(query)}&rule=")
        return self._queries[key]

    def _why(self, limit: LiveLimit) -> SafeString:
        """Return why a rule applies (because of a plan, or by default), and the overrides of the rule."""
        row, plan_of = limit.why.row, limit.why.plan_of
        plan = self._plans.get(row.plan, "")
        if plan_of == "key":
            source = _linked(_("plan %(plan)s of the key") % {"plan": plan}, self._membership_urls.get(row.plan, ""))
        elif plan_of == "account":
            source = _linked(_("plan %(plan)s of the account") % {"plan": plan}, self._account_url)
        else:
            source = self._default
        parts = [(source,), *((self._override_text(override),) for override in limit.why.overrides)]
        return format_html_join(" + ", "{}", parts) if len(parts) > 1 else source

    def _override_text(self, override: OverrideRow) -> SafeString:
        changes = [f"{name} {number(value)}" for name, value in override.numbers]
        changes += [override.mode] if override.mode else []
        text = _("override of %(key)s: %(changes)s") % {"key": override.key, "changes": ", ".join(changes)}
        if override.valid_until != NEVER:
            text += " " + _("until %s") % when(override.valid_until)
        if reason := self._reasons.get(override.pk):
            text += f" ({reason})"
        return _linked(text, self._pages.override.format(override.pk))


def _html(text: str) -> SafeString:
    """Return a plain text as HTML: escape the text, and then mark it as safe.

    A text that is already HTML would be escaped twice. Django's `escape` would take several times as long.
    """
    return SafeString(html.escape(text))


def _action(text: SafeString, rule: SafeString, begin: str) -> SafeString:
    """Return a link to an action on a rule: Reset or Give more.

    The links of all rows have the same text. So the name for screen readers also contains the rule.

    All arguments are HTML, so that texts are escaped only once for all rows. `begin` is the URL up to the rule's name.
    """
    return SafeString(f' <a href="{begin}{rule}" aria-label="{text}: {rule}">{text}</a>')


def _linked(text: str, url: str) -> SafeString:
    return format_html('<a href="{}">{}</a>', url, text) if url else format_html("{}", text)


def _memberships(keys: Sequence[str]) -> Iterable[tuple[int, int]]:
    """Return the memberships that are in force now for these keys.

    Each membership is a pair: the primary key of its plan, and its own primary key.
    """
    now = moments.now()
    rows = PlanMembership.objects.using(conf.DATABASE).filter(key__in=keys)
    rows = rows.filter(Q(valid_from=None) | Q(valid_from__lte=now))
    return rows.filter(Q(valid_until=None) | Q(valid_until__gt=now)).values_list("plan", "pk")


def _next_request(limit: LiveLimit) -> str:
    """Return what happens to the next request, for a rule that would not admit it at once."""
    rule, standing = limit.why.rule, limit.standing
    if rule is None:
        return _("switched off")
    if isinstance(rule, UnreadableRule):
        return _("the failure policy of the rule decides: %s") % rule.on_failure
    if standing is None:
        return _("not known")
    if rule.algorithm.admits_nothing:
        return _("refuses every request")
    if limit.retry_after is None:
        return _("refuses")
    if limit.retry_after == 0:
        return _("lets the request wait %s") % duration(limit.wait)
    return _("refuses; admits again in %s") % duration(limit.retry_after)


def duration(seconds: float) -> str:
    """Return a length of time such as "2 h 5 min", with at most two units, rounded up to the smaller unit.

    A length below 10 s is rounded to one decimal place, and is at least 0.1 s.
    """
    if seconds < 10:
        return _("%s s") % f"{max(seconds, 0.1):.1f}"
    smaller = 3_600 if seconds > 86_400 else 60 if seconds > 3_600 else 1
    # `-(-a // b)` rounds up.
    whole = int(-(-seconds // smaller)) * smaller
    parts = [(whole // 86_400, _("%s d")), (whole % 86_400 // 3_600, _("%s h"))]
    parts += [(whole % 3_600 // 60, _("%s min")), (whole % 60, _("%s s"))]
    # Begin with the largest unit that is not 0.
    first = next(index for index, (count, _unit) in enumerate(parts) if count)
    return " ".join(unit % f"{count:,}" for count, unit in parts[first : first + 2] if count)
