"""Migrations of a newer release, which tests write into a folder of their own after the newest real one."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from app.core.migrate import alembic_config
from app.core.settings import REPOSITORY

TEMPLATE = '''"""A migration of a newer release."""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "{revision}"
down_revision = "{parent}"
{header}

def upgrade() -> None:
    {upgrade}


def downgrade() -> None:
    {downgrade}
'''


def head_revision() -> str:
    head = ScriptDirectory.from_config(alembic_config("sqlite://")).get_current_head()
    assert head is not None
    return head


class NewerRelease:
    """The migrations of this release and further ones, which this release's processes do not know."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self.revisions = folder, [head_revision()]
        self.config = alembic_config(url)
        self.config.set_main_option("path_separator", "os")
        self.config.set_main_option("version_locations", f"{REPOSITORY / 'migrations' / 'versions'}:{folder}")
        folder.mkdir(exist_ok=True)

    def alembic_config(self, url: str) -> Config:
        """Return the configuration, in place of app.core.migrate.alembic_config."""
        return self.config

    def add(self, upgrade: str, downgrade: str = "pass", *, header: str = "") -> str:
        """Add a migration with these statements, in Python. Return its revision."""
        parent, revision = self.revisions[-1], f"newer_{len(self.revisions)}"
        content = TEMPLATE.format(revision=revision, parent=parent, header=header, upgrade=upgrade, downgrade=downgrade)
        (self.folder / f"{revision}.py").write_text(content)
        self.revisions.append(revision)
        return revision

    def upgrade(self) -> None:
        command.upgrade(self.config, "head")

    def downgrade(self, revision: str) -> None:
        command.downgrade(self.config, revision)
