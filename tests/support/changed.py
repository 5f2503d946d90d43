"""A copy of the app in which a test makes a change, to count the files that the change needs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from filecmp import dircmp
from pathlib import Path

import ratelimits
from tests.support import forked

PACKAGE = Path(ratelimits.__file__).parent
ROOT = PACKAGE.parent


def copied(directory: Path) -> Path:
    """Return a copy of the app in a directory."""
    return Path(shutil.copytree(PACKAGE, directory / "ratelimits"))


def places(copy: Path) -> set[str]:
    """Return the files of a copy that differ from the app's, or that only one of them has."""

    def differing(compared: dircmp[str], below: Path) -> set[str]:
        files = {str(below / name) for name in (*compared.left_only, *compared.right_only, *compared.diff_files)}
        return files.union(*(differing(inner, below / name) for name, inner in compared.subdirs.items()))

    return differing(dircmp(PACKAGE, copy, ignore=["__pycache__"]), Path())


def run(copy: Path, program: str, *arguments: str, **environment: str) -> str:
    """Run a program in a process that imports the copy; return what it prints."""
    known = {"PYTHONPATH": os.pathsep.join([str(copy.parent), str(ROOT)]), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = forked.run(
        [sys.executable, "-c", program, *arguments],
        cwd=copy.parent,
        env=os.environ | known | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    output: str = done.stdout
    return output


def listed(section: str) -> list[str]:
    """Return the files that docs/changing.md lists for a change."""
    page = (ROOT / "docs" / "changing.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
