"""The library of the tags of the admin's index. The admin adds its tags, if the project has an admin.

Django imports this module for the first page of every project, also of a project without an admin.
"""

from __future__ import annotations

from django import template

register = template.Library()
