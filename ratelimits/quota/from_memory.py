"""Answer requests from the memory of this process, without asking Redis.

There are three kinds of such requests: requests that a block refuses or an allow exempts; requests that a rule with
capacity 0 refuses; and repetitions of a request that Redis refused shortly before. Once a second, the counts of the
refused requests are sent to Redis.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratelimits import rules
from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine import Decision
from ratelimits.engine.clock import clock
from ratelimits.engine.server import current_server, publications
from ratelimits.identity import Identity
from ratelimits.logs import bounded
from ratelimits.quota.costs import ONE_ITEM, ONE_REQUEST
from ratelimits.quota.counting import counting
from ratelimits.quota.deny_cache import DenyCache, Sender, StoredRefusal
from ratelimits.quota.prepared import Prepared, PreparedCommands, commands_by
from ratelimits.rules import AccessRow, RulesUnavailable
from ratelimits.rules.keyed import NEVER

logger = bounded(__name__)

#: A block with this HTTP status tells the client when the block ends.
_TOO_MANY = 429

denials = DenyCache()


def _load_version(version: int) -> None:
    """Load the rules of a version that Redis reported when it counted refusals.

    A process that only repeats refusals asks Redis for no decisions. It learns of an edit only from these reports.
    """
    try:
        rules.reload(version)
    except RulesUnavailable as error:
        logger.warning("Version %s of the rules cannot be read; the current rules stay in force: %s", version, error)


sender = Sender(denials, current_server, _load_version, lambda: counting.refusals())


def repeated_refusal(denied: StoredRefusal) -> Answer:
    """Return the answer of a repeated refusal. Its retry_after is shorter by the seconds since the decision."""
    retry_after = denied.decision.retry_after
    if retry_after is not None:
        retry_after = max(retry_after - (denials.clock() - denied.since), 1 / MICROSECONDS)  # at least a microsecond
    return Answer(False, denied.decision, denied.payload, retry_after)


def refused(decision: Decision, prepared: Prepared, cache_key: tuple[object, ...]) -> Answer:
    """Return the answer to a request that Redis refused. Store the refusal, so that it is repeated without Redis."""
    seconds = conf.DENY_CACHE_SECONDS
    # Store a refusal only if the rules have a version. Without a version, Redis cannot report that they have changed.
    if seconds > 0 and decision.call.version is not None:
        sender.start()
        denials.keep(cache_key, decision, seconds, prepared)
    return Answer(False, decision, prepared, decision.retry_after)


def refused_by_zero(decision: Decision, prepared: Prepared) -> Answer:
    """Return the refusal of a rule with capacity 0. Count it like a repeated refusal, because Redis is not asked."""
    denials.count(decision)
    sender.start()
    return Answer(False, decision, prepared, None)


def by_row(
    commands: PreparedCommands, identity: Identity, costs: Mapping[str, int] = ONE_REQUEST, *, again: bool = True
) -> Answer | None:
    """Return the answer of a request's block or allow, and count the request; None if the request has neither.

    Redis is not asked. If `again` is true and this process has edited rules after it read them, first read the rules
    again.
    """
    snapshot = commands.snapshot
    assert snapshot is not None
    row = snapshot.access(identity)
    if row is None:
        return None
    if again and not commands.includes_own_edits and reread(commands):
        return by_row(commands_by(rules.current()), identity, costs, again=False)
    counting.by_row(row, identity, ONE_ITEM if costs is ONE_REQUEST else tuple(costs.items()))
    denials.asks = True
    sender.start()
    return commands.row_answers.get(row.pk) or _answer_of_row(commands, row)


def _answer_of_row(commands: PreparedCommands, row: AccessRow) -> Answer:
    """Return the answer of a block or allow. Store the answer if it does not say when the block ends."""
    seconds = None
    if row.blocks and row.status == _TOO_MANY and row.valid_until != NEVER:
        seconds = max(row.valid_until - clock.now(), 1) / MICROSECONDS  # at least a microsecond
    answer = Answer(not row.blocks, retry_after=seconds if row.blocks else 0.0, access=row)
    if seconds is None:
        commands.row_answers[row.pk] = answer
    return answer


async def aby_row(commands: PreparedCommands, identity: Identity, costs: Mapping[str, int]) -> Answer | None:
    """Do the same as `by_row`, in async code."""
    snapshot = commands.snapshot
    assert snapshot is not None
    if not commands.includes_own_edits and snapshot.access(identity) is not None and await areread(commands):
        commands = commands_by(await rules.acurrent())
    return by_row(commands, identity, costs, again=False)


def reread(commands: PreparedCommands) -> bool:
    """Read the rules again after this process has edited some. Return whether `commands` is now too old."""
    commands.publications = publications()
    try:
        return rules.reload() is not commands.snapshot
    except RulesUnavailable as error:
        logger.warning("The rules cannot be read again; the current rules stay in force: %s", error)
        return False


async def areread(commands: PreparedCommands) -> bool:
    """Do the same as `reread`, in async code."""
    commands.publications = publications()
    try:
        return await rules.areload() is not commands.snapshot
    except RulesUnavailable as error:
        logger.warning("The rules cannot be read again; the current rules stay in force: %s", error)
        return False
