"""The command `ratelimits_script`: print the Lua script that decides the requests of a rule."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from ratelimits.engine.assemble.scripts import indented
from ratelimits.engine.call import Call, Meter, Usage
from ratelimits.engine.command import Command as EngineCommand
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Term, program
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.numbers import whole_number
from ratelimits.simulate import decode_json, read_rules


class Command(ExplainedCommand):
    """Print the script that is assembled for the shape of a rule. This needs no database and no Redis."""

    help = (
        "Prints the Lua script that decides a request under a rule, or under a list of rules that are decided together"
        " for one user. The script is assembled for exactly these algorithms."
    )
    examples = ("rule.json", "rule.json --meters 1")
    exit_codes = {0: "the script was printed", 2: "a bad rule, or a file that cannot be read"}
    requires_system_checks = ()
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("rule", metavar="FILE", help="a JSON file with the rule, or with a list of rules")
        parser.add_argument(
            "--meters",
            metavar="N",
            type=whole_number,
            default=0,
            help="count the request in this many meters (default: 0)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            algorithms = read_rules(decode_json(Path(options["rule"]).read_bytes()))
        except OSError as error:
            raise CommandError(f"{options['rule']}: {error.strerror}", returncode=2) from error
        except ValueError as error:
            raise CommandError(f"{options['rule']}: {error}", returncode=2) from error
        count = options["meters"]
        if count < 0:
            raise CommandError("--meters must be 0 or more", returncode=2)
        terms = tuple(Term(algorithm, f"{number}", key=0, slot=0) for number, algorithm in enumerate(algorithms))
        usage = Usage("", "user:1", (Meter("requests"),) * count) if count else None
        costs = (1,) * max(count, 1)  # one cost for each meter; without meters, the rules still need a cost
        call = Call(program(terms), ("user:1",), costs, usage=usage)
        script = EngineCommand(Keyspace("ratelimits", 1), call).script
        self.stdout.write(indented(script.text.decode()), ending="")
