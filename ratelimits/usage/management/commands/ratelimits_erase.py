from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits.conf import conf
from ratelimits.management.authors import author
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.models import Customer
from ratelimits.models.customers import names_of
from ratelimits.models.keys import canonical_account
from ratelimits.usage.erasure.erase import archives_in, preview
from ratelimits.usage.erasure.everywhere import erase_everywhere


class Command(ExplainedCommand):
    help = (
        "Erases a customer: replaces its account texts, its keys and its name by pseudonyms, in all tables and in the"
        " archive files. Reports, sums, digests and manifests stay valid. Without --yes, only says what would be"
        " replaced."
    )
    examples = (
        "acme",
        "k3v5w2q7x4m6a2b3 --yes",
        "k3v5w2q7x4m6a2b3 --archive archives --by ada --reason 'request 42' --yes",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("customer", help="the customer's token, or an account text that names it now")
        parser.add_argument(
            "--archive",
            type=Path,
            action="append",
            default=[],
            metavar="DIRECTORY",
            help="a directory of archive files, which are written again without the names; can be given several times",
        )
        parser.add_argument(
            "--reason",
            default="",
            help="the reason, which the history shows to your colleagues; the customer's names in it become pseudonyms",
        )
        parser.add_argument(
            "--by", help="the user name of the person who decided this, for the history and the admin's log"
        )
        parser.add_argument("--yes", action="store_true", help="erase the customer: this cannot be undone")

    def handle(self, *args: Any, **options: Any) -> None:
        customer, by = _customer(options["customer"]), author(options["by"])
        if not options["yes"]:
            self._preview(customer, options["archive"])
            return
        try:
            done = erase_everywhere(customer, archives_in(options["archive"]), by=by, why=options["reason"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        if done.error:
            self.stderr.write(f"Redis still has limits of the customer, until they expire: {done.error}")
        else:
            self.stdout.write(f"Redis: {plural(done.keys, 'key')} of its limits were deleted.")
        self._write_rows(done.erasure.rows)
        for path in done.erasure.archives:
            self.stdout.write(f"written again: {path}")
        self.stdout.write(f"Customer {customer} was erased. Its reports keep their numbers and their digests.")

    def _preview(self, customer: Customer, directories: list[Path]) -> None:
        found = preview(customer)
        self.stdout.write(f"Customer {customer}: {', '.join(found.texts)}")
        self._write_rows(found.rows)
        given = {path.name for path in archives_in(directories)}
        for name in found.archives:
            self.stdout.write(f"archive: {name}{'' if name in given else ' (not given: --archive DIRECTORY)'}")
        if found.obstacle:
            raise CommandError(found.obstacle)
        self.stdout.write(f"Nothing was changed. To erase this customer: ratelimits_erase {customer} --yes")

    def _write_rows(self, rows: dict[str, int]) -> None:
        for name, count in rows.items():
            self.stdout.write(f"{name}: {count:,}")


def _customer(name: str) -> Customer:
    """Return the customer with this token, or whom this account text names now. Raise CommandError if there is none."""
    customers = Customer.objects.using(conf.DATABASE)
    found = customers.filter(token=name).first()
    if found is not None:
        return found
    text = canonical_account(name)
    names = names_of(conf.DATABASE, [text]).get(text)
    if names is None:
        raise CommandError(
            f"{name!r} is neither the token of a customer nor an account text with usage. (A new text has a customer"
            " once its usage is drained: ratelimits_drain.)"
        )
    return customers.get(pk=names[-1].customer)
