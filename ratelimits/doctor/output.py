"""Write a diagnosis for people, and as JSON for programs. docs/servers.md describes the JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ratelimits.doctor.diagnosis import ServerDiagnosis
from ratelimits.doctor.findings import ServerFinding
from ratelimits.doctor.parts import Part

#: The version of the JSON. It becomes higher if a field is removed or gets another meaning.
FORMAT = 1


def broken(diagnoses: Sequence[ServerDiagnosis], needed: Collection[Part]) -> list[Part]:
    """Return the needed parts that do not work on each server."""
    return [part for part in Part if part in needed and not all(one.works(part) for one in diagnoses)]


def as_json(diagnoses: Sequence[ServerDiagnosis], needed: Collection[Part], *, stuck: bool) -> dict[str, Any]:
    """Return the diagnosis as an object for JSON. `stuck`: usage is counted that will not reach the ledger."""
    return {
        "format": FORMAT,
        "ok": not broken(diagnoses, needed),
        "needed": [str(part) for part in Part if part in needed],
        "stuck": stuck,
        "servers": [_server(one) for one in diagnoses],
    }


def _server(one: ServerDiagnosis) -> dict[str, Any]:
    return {
        "address": one.address,
        "user": one.user,
        "product": (one.properties and one.properties.product) or None,
        "version": (one.properties and one.properties.version) or None,
        "works": [str(part) for part in Part if one.works(part)],
        "fails": [str(part) for part in Part if not one.works(part)],
        "findings": [_finding(found) for found in one.findings],
        "acl": one.acl_line,
    }


def _finding(found: ServerFinding) -> dict[str, Any]:
    return {
        "name": found.name,
        "parts": [str(part) for part in Part if part in found.parts],
        "why": found.why,
        "mend": found.mend,
    }


def rows(one: ServerDiagnosis, needed: Collection[Part]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each part: its name, whether it works, whether the project needs it, and what it does."""
    for part in Part:
        works = "yes" if one.works(part) else "at risk" if one.is_only_endangered(part) else "NO"
        yield part, works, "yes" if part in needed else "no", part.meaning


def heading(one: ServerDiagnosis) -> str:
    """Return the line that names a server."""
    said = "a server that tells no version"
    if one.properties and one.properties.product:
        said = f"{one.properties.product} {one.properties.version}"
    return f"{one.address}: {said}, as the user {one.user}"


def sentences(one: ServerDiagnosis) -> Iterator[str]:
    """Yield the findings as lines of text: what is wrong, which parts fail because of it, and what to do."""
    for found in one.findings:
        stopped = ", ".join(part for part in Part if part in found.parts)
        yield f"- {found.why}"
        yield f"    {'endangers' if found.endangers else 'stops'}: {stopped or 'nothing'}"
        yield f"    to do: {found.mend}"
    if one.acl_line:
        yield f"All missing rights in one line: {one.acl_line}"
