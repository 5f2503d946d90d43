"""An app with users of its own, for a project without django.contrib.auth."""
