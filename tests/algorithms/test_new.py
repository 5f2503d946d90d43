"""Test a new algorithm in a copy of the app: it needs the places that docs/changing.md lists, and no others."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from ratelimits.algorithms.limits import ALGORITHMS
from tests.support.changed import PACKAGE, copied, listed, places, run

CLASS = '''
"""The algorithm of pauses."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from ratelimits.algorithms.base import Bounded, Params, Wording, amount, gettext_noop, length, micros


@dataclass(frozen=True, slots=True)
class Pause(Bounded):
    """At most `capacity` at once, and then nothing for `period` seconds."""

    id = "pause"
    label = gettext_noop("pause")
    code = 12
    script = "pause"
    period: Decimal

    def _check(self) -> None:
        Bounded._check(self)
        self._set("period", length("period", self.period))

    def sentence(self, words: Wording, unit: str) -> list[str]:
        shown = {"amount": amount(self.capacity, unit), "span": words.span(self.period)}
        return [words.gettext("%(amount)s at once") % shown, words.gettext("then a pause of %(span)s") % shown]

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, micros(self.period)

    def params(self, now: int) -> Params:
        return micros(self.period), 0, 0, 0, 0, self.capacity
'''
LUA = """-- pause (12): at most capacity at once, and then nothing for a period.
--@params * period - - - - capacity
--@record pause I7 last I7 til
local pause = {}

function pause.initial(l)
  l.til = at
end

function pause.resolve(l)
  l.til = l.til - l.shift
end

function pause.check(l)
  if l.cost > l.capacity then
    l.retry = NEVER
  elseif l.til <= at then
    l.ok = true
  else
    l.retry = l.til - at
  end
end

function pause.charge(l)
  l.til = at + l.period
end

function pause.refund(l)
  l.til, l.undone = at, true
end

function pause.standing(l)
  l.remaining, l.reset = l.til <= at and l.capacity or 0, math.max(l.til - at, 0)
end

function pause.store(l)
  l.life = l.til - at
end
"""
#: A script that runs in the copy, in its own process, as after the deployment of a version with the algorithm.
USE = """
import io, json, sys
from pathlib import Path

import django
from django.core.management import call_command

django.setup()
call_command("makemigrations", "ratelimits", name="pause", verbosity=0)
call_command("migrate", verbosity=0)

from django.contrib.auth.models import User
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.views import APIView

from ratelimits import as_code
from ratelimits.admin.rule_form.forms import RuleForm
from ratelimits.models import Rule

filled = {"name": "calm", "scope": "*", "key_kind": "caller", "meter": "requests", "mode": "enforce"}
filled["algorithm"] = "pause"
form, whole = RuleForm(filled | {"capacity": "2"}), RuleForm(filled | {"capacity": "2", "period": "40", "rate": "7"})
said = {"errors": form.errors.get_json_data(), "choice": dict(Rule._meta.get_field("algorithm").flatchoices)["pause"]}
rule = whole.save()
said |= {"sentence": rule.sentence(), "rate": rule.rate}


class View(APIView):
    permission_classes = []

    def get(self, request):
        return django.http.HttpResponse("served")


responses = []
for _ in range(3):
    request = APIRequestFactory().get("/")
    force_authenticate(request, User(pk=7, username="ann"))
    responses.append(View.as_view()(request))
said["statuses"] = [response.status_code for response in responses]
said["headers"] = [dict(response.headers) for response in responses]

trace = Path(sys.argv[1])
lines = [{"at": at, "cost": cost} for at, cost in ((0, 2), (1, 1), (40, 3), (40, 1))]
trace.write_text("".join(json.dumps(line) + "\\n" for line in lines))
trace.with_suffix(".rule").write_text(json.dumps({"algorithm": "pause", "capacity": 2, "period": 40}))
out = io.StringIO()
call_command("ratelimits_simulate", rule=str(trace.with_suffix(".rule")), trace=str(trace), stdout=out)
said["outcomes"] = [json.loads(line) for line in out.getvalue().splitlines()]
print(json.dumps(said, default=str))
"""
#: The line in the registry, after the last one.
REGISTRY = Path("algorithms/limits.py")


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """Make a copy of the app with the algorithm's class, Lua and line in the registry."""
    copy = copied(tmp_path)
    (copy / "algorithms" / "pause.py").write_text(CLASS.lstrip())
    (copy / "lua" / "algorithms" / "pause.lua").write_text(LUA)
    text = (copy / REGISTRY).read_text()
    text = text.replace("    Concurrency,\n)\n", "    Concurrency,\n    Pause,\n)\n")
    line = "from ratelimits.algorithms.rates"
    text = text.replace(line, f"from ratelimits.algorithms.pause import Pause\n{line}", 1)
    (copy / REGISTRY).write_text(text)
    return copy


def test_a_new_algorithm_takes_a_class_a_lua_file_a_line_and_a_migration(changed: Path, redis_url: str) -> None:
    database = f"sqlite:///{changed.parent / 'toy.sqlite3'}"
    trace = str(changed.parent / "trace")
    said: dict[str, Any] = json.loads(run(changed, USE, trace, DATABASE_URL=database, REDIS_URL=redis_url))
    touched = places(changed)
    (migration,) = (name for name in touched if name.startswith("migrations/"))
    places_listed = {place.replace("<name>", "pause") for place in listed("A new algorithm")}
    assert touched == places_listed - {"migrations/"} | {migration}
    assert len(touched) == 4

    assert said["choice"] == "pause"
    assert list(said["errors"]) == ["period"]
    assert said["rate"] is None  # a field of other algorithms, which is dropped
    assert said["sentence"] == "2 requests at once, then a pause of 40 seconds, per caller"

    assert said["statuses"] == [200, 429, 429]
    first, second, third = said["headers"]
    assert first["RateLimit-Policy"] == second["RateLimit-Policy"] == '"calm";q=2;w=40'
    assert first["RateLimit"] == '"calm";r=0;t=40'
    assert second["Retry-After"] == third["Retry-After"] == "40"

    shown = [(one["allowed"], one["remaining"], one["retry_after"]) for one in said["outcomes"]]
    assert shown == [(True, 0, 0.0), (False, 0, 39.0), (False, 2, None), (True, 0, 0.0)]


def test_nothing_but_the_algorithms_themselves_asks_which_one_it_is() -> None:
    names = {kind.__name__ for kind in ALGORITHMS.values()} | set(ALGORITHMS)
    found = set()
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE)
        if where.parts[0] in ("algorithms", "migrations"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            said = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
            if isinstance(said, str) and said in names:
                found.add((str(where), said))
    # The form offers examples. A rate that is typed or imported becomes a limit of one algorithm. The doctor tries all.
    making = {"admin/rule_form/starting_points.py", "usage/admin/yesterday.py", "outbound/deciding.py"}
    making |= {"moving/rates.py", "throttling/by_rates.py"}
    making |= {"doctor/findings.py", "usage/doctor.py", "doctor/walks.py"}
    assert {(where, name) for where, name in found if where not in making} == set()
