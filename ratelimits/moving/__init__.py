"""Find the rates that a project has written for other libraries, and make rules of them.

`throttles` finds the throttles of Django REST framework, and `decorated` finds the decorators of django-ratelimit.
"""
