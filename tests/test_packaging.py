from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from trove_classifiers import classifiers

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Modules that only system tests import, when they run.
_OF_SYSTEM_TESTS = ["tests/identity/oauth_recipes.py", "tests/support/floors.py"]
DATA = {".lua", ".html", ".css", ".js", ".svg", ".po", ".mo", ".typed", ".json"}


def requirements() -> set[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return {_plain(line) for line in lines if line}


def _plain(requirement: str) -> str:
    return re.sub(r"\s+", "", requirement).replace("'", '"')


def _only_ci_installs() -> set[str]:
    """Return the import names of packages that .ci/requirements.txt adds to requirements.txt."""
    lines = (ROOT / ".ci" / "requirements.txt").read_text().splitlines()
    added = {canonicalize_name(re.split(r"[~><=]", line)[0]) for line in lines if line and not line.startswith("#")}
    return {
        module
        for module, distributions in packages_distributions().items()
        if {canonicalize_name(name) for name in distributions} <= added
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_data_file_of_the_app_and_nothing_else_but_the_app(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ratelimits").rglob("*")
        if path.suffix in DATA and "__pycache__" not in path.parts
    }
    assert {".lua", ".mo"} <= {Path(name).suffix for name in data}
    assert data <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ratelimits"}


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ratelimits").rglob("*.py")}
    assert modules <= set(wheel.namelist())


def test_requirements_txt_installs_all_that_the_package_and_its_extras_ask_for() -> None:
    project = PYPROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = {_plain(line) for line in project["dependencies"] + extras}
    assert {line for line in wanted if not line.startswith("django-ratelimits[")} == requirements()


def test_the_tests_are_collected_without_what_only_ci_installs() -> None:
    added, found = _only_ci_installs(), []
    for path in set(ROOT.glob("tests/**/*.py")) - {ROOT / name for name in _OF_SYSTEM_TESTS}:
        for node in ast.parse(path.read_text()).body:  # imports in functions, or only for types, are no matter
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[0] in added]
    assert found == []


def test_the_version_is_written_once() -> None:
    import ratelimits

    assert PYPROJECT["project"]["version"] == ratelimits.__version__


def test_classifiers_are_known_and_name_the_versions_that_are_tested() -> None:
    named = PYPROJECT["project"]["classifiers"]
    assert set(named) <= classifiers
    session = (ROOT / "noxfile.py").read_text()
    for framework in ("5.2", "6.0", "6.1"):
        assert f"Framework :: Django :: {framework}" in named
        assert framework in session


def test_the_project_has_addresses_of_its_pages() -> None:
    urls = PYPROJECT["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Changelog"}
    assert PYPROJECT["project"]["name"] in urls["Homepage"]
    assert (ROOT / "docs" / Path(urls["Changelog"]).name.replace(".html", ".md")).exists()


_START = """
import sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
        "django.contrib.sessions", "django.contrib.messages", "simple_history",
        "ratelimits", "ratelimits.usage", "ratelimits.billing"],
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1/1"}},
    ROOT_URLCONF="",
)
django.setup()
print(*sorted({"rest_framework", "celery", "rich", "xlsxwriter", "opentelemetry.exporter"} & sys.modules.keys()))
"""


def test_the_app_starts_without_the_packages_that_only_some_projects_use() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    started = subprocess.run(
        [sys.executable, "-c", _START], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert started.stdout.strip() == ""


def test_on_windows_the_import_says_what_to_do() -> None:
    code = "import sys; sys.platform = 'win32'; import ratelimits"
    started = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert "ImportError: ratelimits runs on Linux and macOS. On Windows, run the project in WSL" in started.stderr
