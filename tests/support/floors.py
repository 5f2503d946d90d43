"""The contract of the floors, for import-linter: a module imports only modules of its own floor and of lower floors.

pyproject.toml lists the rooms of each floor. A module that it does not list has the floor of its package. Imports that
still point up are listed too, as `ignore_imports`. This list can only become shorter: an entry breaks the contract as
soon as no import that points up needs it.
"""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph, build_graph
from importlinter.application import contract_utils, output
from importlinter.application.contract_utils import AlertLevel
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck, InvalidContractOptions

APP = "ratelimits"
#: The floors, the lowest first: to decide, to limit, to count, to bill.
FLOORS = ("decide", "limit", "count", "bill")


class FloorsContract(Contract):
    """Each option named after a floor lists rooms and modules."""

    type_name = "floors"

    decide: Any = fields.SetField(subfield=fields.StringField())
    limit: Any = fields.SetField(subfield=fields.StringField())
    count: Any = fields.SetField(subfield=fields.StringField())
    bill: Any = fields.SetField(subfield=fields.StringField())
    ignore_imports: Any = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def validate(self) -> None:
        """Raise InvalidContractOptions for a name that is listed twice, or that its package says already."""
        listed = [name for floor in FLOORS for name in getattr(self, floor)]
        twice = sorted({name for name in listed if listed.count(name) > 1})
        if twice:
            raise InvalidContractOptions({"floors": f"Listed on two floors: {', '.join(twice)}."})
        idle = sorted(name for name in listed if self._floor(name.rpartition(".")[0]) == self._floor(name))
        if idle:
            raise InvalidContractOptions({"floors": f"Their package is listed on the same floor: {', '.join(idle)}."})

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return whether all imports that point up are allowed, and all allowed ones point up."""
        if self.session_options.get("exclude_type_checking_imports"):
            # The floors are also for imports that only a type checker reads.
            graph = build_graph(APP, exclude_type_checking_imports=False, cache_dir=None)
        modules = {name for name in graph.modules if name == APP or name.startswith(f"{APP}.")}
        missing = {name for floor in FLOORS for name in getattr(self, floor)} - modules
        if missing:
            raise ValueError(f"No such module: {', '.join(sorted(missing))}")
        removed = contract_utils.remove_ignored_imports_and_report(graph, self.ignore_imports, AlertLevel.ERROR)
        allowed = {(one.importer.name, one.imported.name) for one in removed.removed_imports}
        # The package of the app itself has no floor: all import it, and it imports nothing.
        floorless = sorted(name for name in modules - {APP} if self._floor(name) is None)
        needless = sorted(arrow for arrow in allowed if not self._points_up(*arrow))
        imports = [(one, other) for one in modules for other in graph.find_modules_directly_imported_by(one)]
        up = sorted(arrow for arrow in imports if self._points_up(*arrow))
        return ContractCheck(
            kept=not (floorless or needless or up),
            ignored_import_count=removed.ignored_import_count,
            metadata={"floorless": floorless, "needless": needless, "up": up},
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print what is wrong, one import or module a line."""
        for importer, imported in check.metadata["up"]:
            floors = f"{self._word(importer)} -> {self._word(imported)}"
            output.print_error(f"- {importer} -> {imported} points up ({floors})", bold=False)
        for importer, imported in check.metadata["needless"]:
            output.print_error(f"- {importer} -> {imported} does not point up: remove it from the list", bold=False)
        for module in check.metadata["floorless"]:
            output.print_error(f"- {module} is on no floor", bold=False)

    def _floor(self, name: str) -> int | None:
        """Return the number of a module's floor, or of its nearest listed package; None if no floor lists one."""
        while name:
            for number, floor in enumerate(FLOORS):
                if name in getattr(self, floor):
                    return number
            name = name.rpartition(".")[0]
        return None

    def _word(self, name: str) -> str:
        floor = self._floor(name)
        return "no floor" if floor is None else FLOORS[floor]

    def _points_up(self, importer: str, imported: str) -> bool:
        above, below = self._floor(imported), self._floor(importer)
        return above is not None and below is not None and above > below
