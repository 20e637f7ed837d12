"""Retries for tests that need the demo model to call a tool, to fill in a schema, or to end in time.

A sampled reply may be too long, or end before a client can interrupt it. Such a reply is correct, but does not show
what the test is about. A defect that shows in some replies only would be retried too, so this module, which is a plugin
of pytest, says at the end of a run how often each test was.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

TRIES = 4
PROPERTY = "retries"
failures: list[str] = []  # of the running test's tries that were repeated


def with_retries(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test up to four times; a failure of the last attempt fails the test."""
    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def run_async(**kwargs: Any) -> None:
            for _ in range(TRIES - 1):
                try:
                    return await test(**kwargs)
                except Exception as error:
                    failures.append(_first_line(error))
            return await test(**kwargs)

        return run_async

    @functools.wraps(test)
    def run(**kwargs: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(**kwargs)
            except Exception as error:
                failures.append(_first_line(error))
        return test(**kwargs)

    return run


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Attach the failures to the test's report, which xdist sends to the process that prints the summary."""
    failures.clear()
    try:
        return (yield)
    finally:
        if failures:
            item.user_properties.append((PROPERTY, [*failures]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    retried = {
        report.nodeid: value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    }
    if retried:
        terminalreporter.section("retries of sampled replies")
        count = sum(map(len, retried.values()))
        terminalreporter.line(f"{count} in {len(retried)} tests; a test that is here in every run hides a defect")
        for nodeid, errors in sorted(retried.items()):
            terminalreporter.line(f"{nodeid}: {len(errors)}: {'; '.join(errors)}")
