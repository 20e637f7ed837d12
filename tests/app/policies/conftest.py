"""Fixtures for the tests of policies."""

from tests.support.cli import cli_harness

__all__ = ["cli_harness"]
