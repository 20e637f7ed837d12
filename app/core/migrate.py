"""Alembic migrations of the database."""

from alembic import command
from alembic.config import Config

from app.core.settings import REPOSITORY


def alembic_config(url: str) -> Config:
    """Return Alembic's configuration for the database at `url`."""
    config = Config(attributes={"url": url})
    config.set_main_option("script_location", str(REPOSITORY / "migrations"))
    return config


def upgrade(url: str) -> None:
    """Run every missing migration. Starts an event loop of its own, so it must be called outside of one."""
    command.upgrade(alembic_config(url), "head")
