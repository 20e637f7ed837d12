"""Bring the database's schema to what this code expects."""

from alembic import command
from alembic.config import Config

from app.core.settings import REPOSITORY


def alembic_config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(REPOSITORY / "migrations"))
    config.attributes["url"] = url
    return config


def upgrade(url: str) -> None:
    """Run every migration that is missing. Runs an event loop of its own: call it outside of one."""
    command.upgrade(alembic_config(url), "head")
