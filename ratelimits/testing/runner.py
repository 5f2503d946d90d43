"""Run tests with Django's runner: `TEST_RUNNER = "ratelimits.testing.runner.QuotaTestRunner"`."""

from __future__ import annotations

from typing import Any

from django.test.runner import (  # type: ignore[attr-defined]  # django-stubs does not know _init_worker
    DiscoverRunner,
    ParallelTestSuite,
    _init_worker,
)

from ratelimits.testing.preparing import prepare_tests


def _prepare_worker(*arguments: Any) -> None:
    """Prepare a parallel worker. A worker that was not forked knows nothing of its parent's `prepare_tests`."""
    _init_worker(*arguments)
    prepare_tests()


class QuotaParallelTestSuite(ParallelTestSuite):
    """Run tests in parallel workers, and tell the app in each of them that it runs tests."""

    init_worker = _prepare_worker


class QuotaTestRunnerMixin:
    """Let a project's own runner tell the app that this process runs tests: `class Runner(QuotaTestRunnerMixin, …)`."""

    parallel_test_suite: type[ParallelTestSuite] = QuotaParallelTestSuite

    def setup_test_environment(self, **kwargs: Any) -> None:
        """Do what the project's runner does, and call `prepare_tests`."""
        super().setup_test_environment(**kwargs)  # type: ignore[misc]
        prepare_tests()


class QuotaTestRunner(QuotaTestRunnerMixin, DiscoverRunner):
    """Django's runner, which also tells the app that this process runs tests."""
