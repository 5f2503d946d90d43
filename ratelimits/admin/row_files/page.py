"""The pages that import a CSV file into a table, or export the rows of a table.

An import has three steps: the user chooses a file, looks at its differences from the table, and confirms them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, router
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ratelimits import moments
from ratelimits.admin.audited import REASON, AuditedAdmin, reason_field, recorded_user
from ratelimits.admin.operate.confirming import Consequences, changed_bills
from ratelimits.admin.row_files.shown import (
    ShownLines,
    changes_bills,
    deleted_before,
    edited_terms,
    page_of,
    unknown_keys,
)
from ratelimits.files import FileDownload, csv_lines, encoded
from ratelimits.models import Upload
from ratelimits.row_files import (
    ChangedSinceError,
    FileEffect,
    NotImportedError,
    SeenEffect,
    effect_of_file,
    import_rows,
    tables,
    write,
)
from ratelimits.row_files.comparing import LineState, compare
from ratelimits.row_files.tables import MAX_BYTES, MAX_LINES, BadFileError, Source, read, too_large

if TYPE_CHECKING:
    _Base = AuditedAdmin
else:
    _Base = object

#: Number of rows that an export reads at once.
_READ_AT_ONCE = 2000


class FileForm(forms.Form):
    """The form in which the user chooses a file."""

    file = forms.FileField(label=gettext_lazy("CSV file"))

    def clean_file(self) -> Any:
        """Return the file. Refuse a file that is too large, before it is read."""
        file = self.cleaned_data["file"]
        if message := too_large(file.size):
            raise forms.ValidationError(message)
        return file


class ConfirmForm(forms.Form):
    """The form that confirms the differences. It also asks for the reason of the change.

    digest     digest of the differences that the page has shown
    version    version of the configuration with which the page has compared the file
    good_only  whether to import the correct lines and to leave the wrong lines out
    """

    digest = forms.CharField(widget=forms.HiddenInput)
    version = forms.IntegerField(widget=forms.HiddenInput)
    good_only = forms.BooleanField(required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields[REASON] = reason_field()

    @property
    def seen(self) -> SeenEffect:
        """Return the effect of the file, as the user has seen it. Use this property only if the form is valid."""
        return SeenEffect(self.cleaned_data["digest"], self.cleaned_data["version"])


class RowFiles(_Base):
    """Mixin for admin pages of tables that can be imported and exported.

    It adds links to the import and the export above the list.
    """

    change_list_template = "ratelimits/admin/rows_change_list.html"

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs. Import and export come first, because Django's last URL pattern matches every path."""
        view, url_name = self.admin_site.admin_view, f"{self.model._meta.app_label}_{self.model._meta.model_name}"
        return [
            path("import/", view(self.import_view), name=f"{url_name}_import"),
            path("export/", view(self.export_view), name=f"{url_name}_export"),
            *super().get_urls(),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        url_name = f"{self.admin_site.name}:{self.model._meta.app_label}_{self.model._meta.model_name}"
        query = f"?{request.GET.urlencode()}" if request.GET else ""
        context = {"export_url": reverse(f"{url_name}_export") + query}
        if self._may_import(request):
            context["import_url"] = reverse(f"{url_name}_import")
        return super().changelist_view(request, context | (extra_context or {}))

    def _may_import(self, request: HttpRequest) -> bool:
        """Return whether the user may import files. A file can add and change rows, so both permissions are needed."""
        return self.has_add_permission(request) and self.has_change_permission(request)

    @property
    def _table(self) -> tables.FileTable:
        return tables.TABLES[self.model]

    @property
    def _database(self) -> str:
        # The newest rows are needed. A replica may not have these rows yet.
        return router.db_for_write(self.model)

    def export_view(self, request: HttpRequest) -> HttpResponseBase:
        """Return a file with all rows that match the filters of the list. The file can be imported again."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            rows = self.get_changelist_instance(request).queryset
        except IncorrectLookupParameters:
            return HttpResponseRedirect(self._list_url())
        if "plan" in self._table.columns:
            rows = rows.select_related("plan")
        lines = tables.lines(self._table, rows.iterator(chunk_size=_READ_AT_ONCE))
        name = f"{self._table.name}-{moments.local(moments.now()):%Y-%m-%d}.csv"
        chunks = encoded(csv_lines(self._table.columns, self._table.numbers, lines))
        return FileDownload(chunks, "text/csv; charset=utf-8", name)

    def import_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for a file. With `?file=`, show what the file would change. When the user confirms, import the file."""
        if not self._may_import(request):
            raise PermissionDenied
        if "file" in request.GET:
            return self._file_view(request)
        form = FileForm(request.POST, request.FILES) if request.method == "POST" else FileForm()
        if request.method == "POST" and form.is_valid():
            raw = form.cleaned_data["file"].read()
            try:
                read(raw, self._table)
            except BadFileError as error:
                form.add_error("file", str(error))
            else:
                upload = Upload.keep(self._table.name, request.user.pk, raw, self._database)
                return HttpResponseRedirect(f"{request.path}?file={upload.pk}")
        return self._page(
            request,
            "ratelimits/admin/import_file.html",
            form=form,
            columns=[self._column_help(name) for name in self._table.columns],
            limits={"size": MAX_BYTES // 2**20, "lines": f"{MAX_LINES:,}"},
        )

    def _column_help(self, name: str) -> tuple[str, bool, Any]:
        """Return the name of a column, whether a file needs the column, and the help text."""
        column: Any = self.model._meta.get_field(name)
        return name, name in self._table.needed, column.help_text

    def _file_view(self, request: HttpRequest) -> HttpResponse:
        """Show what a stored file would change. If the user confirms this, import the file."""
        pk = request.GET["file"]
        # A number with 19 digits or more could be too large for the column.
        is_number = pk.isdecimal() and len(pk) < 19
        upload = Upload.find(int(pk), self._table.name, request.user.pk, self._database) if is_number else None
        if upload is None:
            self.message_user(request, _("This file is no longer stored: choose it again."), messages.WARNING)
            return HttpResponseRedirect(request.path)
        source = read(upload.raw(), self._table)
        form = None
        if request.method == "POST":
            form = ConfirmForm(request.POST)
            imported = self._import(request, source, form) if form.is_valid() else None
            for name, texts in form.errors.items():
                self.message_user(request, f"{form[name].label}: {' '.join(map(str, texts))}", messages.ERROR)
            if imported is not None:
                upload.delete()
                return self._finished(request, imported)
        return self._difference_page(request, source, form)

    def _difference_page(self, request: HttpRequest, source: Source, form: ConfirmForm | None) -> HttpResponse:
        """Return the page with the differences. `form` is the form that was posted but not accepted, or None."""
        effect, lines = effect_of_file(self._table, source, self._database)
        shown_lines = ShownLines(request.GET.get("show", ""), page_of(request.GET.get("page", "")))
        # Accounts have no column of a key. Only they can have been deleted before, and have billing periods and bills.
        noted = (
            {"unknown": unknown_keys()}
            if "key" in self._table.columns
            else {"deleted": deleted_before(), "terms": edited_terms()}
        )
        # Only the first page says which bills change, because to find this out the file is tried.
        says_bills = "terms" in noted and not {"page", "show"} & request.GET.keys()
        billed: list[str] = []
        for line in lines:
            shown_lines.add(line)
            if says_bills and changes_bills(line):
                billed.append(line.row.identifier)
            for each in noted.values():
                each.add(line)
        for each in noted.values():
            each.finish()
        typed = {} if form is None else {REASON: request.POST.get(REASON), "good_only": request.POST.get("good_only")}
        initial = {"digest": effect.digest, "version": effect.version, **typed}
        return self._page(
            request,
            "ratelimits/admin/import_difference.html",
            form=ConfirmForm(initial=initial),
            errors=effect.counts[LineState.ERROR],
            good=effect.good,
            sections=shown_lines.sections(request.GET["file"], effect.counts),
            start_url=request.path,
            bills=self._changed_bills(source, billed) if billed else None,
            **noted,
        )

    def _changed_bills(self, source: Source, accounts: Collection[str]) -> Consequences | None:
        """Return which bills of these accounts a file would change; None if none, or if the database refuses a row."""

        def save() -> None:
            for portion in compare(self._table, source, self._database):
                write(self._table, [line for line in portion if changes_bills(line)], self._database)

        try:
            return changed_bills(self._database, lambda: accounts, save)
        except IntegrityError:
            return None  # An import says it.

    def _import(self, request: HttpRequest, source: Source, form: ConfirmForm) -> FileEffect | None:
        """Import a file, and return its effect. If nothing was imported, show the reason and return None."""
        try:
            with recorded_user(request):
                return import_rows(
                    self._table,
                    source,
                    self._database,
                    form.seen,
                    good_only=form.cleaned_data["good_only"],
                    after_portion=lambda new, changed: self._log(request, new, changed),
                )
        except ChangedSinceError as error:
            text = _(
                "Nothing was imported: the file would now make other changes than you have seen. Look at the changes"
                " again."
            )
            if error.lines:
                changed_lines = ", ".join(f"{line.number} ({line.name})" for line in error.lines[:10])
                text += " " + _("Since then, somebody has changed the rows of these lines: %(lines)s.") % {
                    "lines": changed_lines
                }
            self.message_user(request, text, messages.ERROR)
        except NotImportedError:
            text = _("Nothing was imported: correct the wrong lines, or tick the box that leaves them out.")
            self.message_user(request, text, messages.ERROR)
        except IntegrityError as error:
            text = _("Nothing was imported: the database refused a row (%(error)s).") % {"error": error}
            self.message_user(request, text, messages.ERROR)
        return None

    def _log(self, request: HttpRequest, new: Sequence[Any], changed: Sequence[Any]) -> None:
        """Add the rows to the log of the admin."""
        assert request.user.pk is not None
        for rows, flag, verb in ((new, ADDITION, "added"), (changed, CHANGE, "changed")):
            if rows:
                LogEntry.objects.log_actions(request.user.pk, rows, flag, [{verb: {}}], single_object=False)

    def _finished(self, request: HttpRequest, imported: FileEffect) -> HttpResponse:
        """Return a redirect to the list, with a message that has the number of imported rows."""
        if not imported.good:
            self.message_user(request, _("There was nothing to change."), messages.INFO)
            return HttpResponseRedirect(self._list_url())
        text = ngettext(
            "%(n)s row was imported: %(new)s new, %(changed)s changed.",
            "%(n)s rows were imported: %(new)s new, %(changed)s changed.",
            imported.good,
        )
        counts = {
            "n": imported.good,
            "new": imported.counts[LineState.NEW],
            "changed": imported.counts[LineState.CHANGED],
        }
        message = text % {name: f"{n:,}" for name, n in counts.items()}
        if wrong := imported.counts[LineState.ERROR]:
            left_out = ngettext("%(n)s wrong line was left out.", "%(n)s wrong lines were left out.", wrong)
            message += " " + left_out % {"n": f"{wrong:,}"}
        self.message_user(request, message, messages.SUCCESS)
        return HttpResponseRedirect(self._list_url())

    def _list_url(self) -> str:
        return reverse(f"{self.admin_site.name}:{self.model._meta.app_label}_{self.model._meta.model_name}_changelist")

    def _page(self, request: HttpRequest, template: str, **context: Any) -> HttpResponse:
        opts = self.model._meta
        context |= {
            **self.admin_site.each_context(request),
            "opts": opts,
            "title": _("Import %(rows)s") % {"rows": opts.verbose_name_plural},
            "back": self._list_url(),
        }
        return TemplateResponse(request, template, context)
