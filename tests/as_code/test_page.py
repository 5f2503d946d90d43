"""Do what docs/rules-as-code.md tells people to do, word for word."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from django.core.management import call_command

from ratelimits import as_code
from ratelimits.models import Plan, Rule
from tests.support.forked_shell import forked_python
from tests.support.fresh import Project
from tests.support.servers import TestServers
from tests.support.snippets import ROOT, snippets

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = [one for one in snippets() if one.page == "docs/rules-as-code.md"]
((EXAMPLE,), (COMMANDS,), STEPS) = (
    [one.text for one in PAGE if one.language == name] for name in ("json", "sh", "yaml")
)


def test_the_example_loads_and_is_dumped_in_numbers(tmp_path: Path) -> None:
    (path := tmp_path / "rules.json").write_text(EXAMPLE)
    call_command("ratelimits_rules", "load", str(path))
    assert list(Plan.objects.values_list("slug", flat=True)) == ["pro"]
    assert {str(rule): rule.sentence() for rule in Rule.objects.all()} == {
        "burst": "5 requests per second, bursts to 10, per user",
        "burst (Pro)": "50 requests per second, bursts to 100, per user",
        "search": "100 requests per minute, sliding in 10 steps, per caller, on search",
        "monthly": "5,000 requests per calendar month (UTC), per account",
    }
    typed = {(rule["name"], rule.get("plan")) for rule in json.loads(EXAMPLE)["rules"]}
    assert {(rule["name"], rule.get("plan")) for rule in as_code.dump("default")["rules"]} == typed


def shell(project: Project, commands: str) -> subprocess.CompletedProcess[str]:
    """Run commands in a project as a step of CI does."""
    project.write("settings.json", json.dumps(project.settings))
    with forked_python(project.directory / "programs") as environment:
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", commands],
            cwd=project.directory,
            env={**environment, "PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "settings"},
            capture_output=True,
            text=True,
            check=False,
        )


def test_the_steps_of_ci_and_the_commands_run_in_a_project(tmp_path: Path, servers: TestServers) -> None:
    project = Project(tmp_path, servers)
    project.create_database("default")
    project.write("rules.json", EXAMPLE)
    check, deploy = (re.sub(r"^ +", "", step.partition("run: |\n")[2], flags=re.MULTILINE) for step in STEPS)
    assert shell(project, check).returncode == 0
    assert shell(project, deploy).returncode == 0
    assert shell(project, COMMANDS).returncode == 0
    project.write("rules.json", EXAMPLE.replace('"5/s"', '"5/sec0nd"'))
    wrong = shell(project, check)
    assert wrong.returncode == 1
    assert "rule 1: “burst”: “5/sec0nd” is not a rate" in wrong.stderr


def test_what_the_admin_has_edited_is_shown_and_set_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "rules.json").write_text(EXAMPLE)
    call_command("ratelimits_rules", "load", str(path))
    Rule.objects.filter(name="search").update(capacity=7)
    Rule.objects.filter(name="monthly").delete()
    Rule.objects.create(name="added", capacity=1, rate=1, period=1)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call_command("ratelimits_rules", "diff", str(path), "--delete")
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    for sign, name in (("-", "search"), ("+", "search"), ("+", "monthly"), ("-", "added")):
        assert re.search(rf'^\{sign} +{{"name": "{name}"', shown, re.MULTILINE), (sign, name)
    call_command("ratelimits_rules", "load", str(path))
    assert set(Rule.objects.filter(plan=None).values_list("name", flat=True)) == {"added", "burst", "monthly", "search"}
    assert Rule.objects.get(name="search").capacity == 100
    call_command("ratelimits_rules", "load", str(path), "--delete")
    assert not Rule.objects.filter(name="added").exists()
    call_command("ratelimits_rules", "diff", str(path), "--delete")


def test_the_page_is_in_the_index() -> None:
    assert "(rules-as-code.md)" in (ROOT / "docs/README.md").read_text()
    assert "\nrules-as-code\n" in (ROOT / "docs/index.md").read_text()
