"""One look into an index finds the versions that open episodes are pinned to. Expand only."""

import sqlalchemy as sa

from migrations import online

revision = "20261127_0710"
down_revision = "20261127_0700"
branch_labels = None
depends_on = None
IS_PINNED = sa.text("state = 'open' AND version_rule = 'pin'")


def upgrade() -> None:
    online.create_index(
        "ix_episodes_pinned",
        "episodes",
        ["policy_id", "start_version_id"],
        postgresql_where=IS_PINNED,
        sqlite_where=IS_PINNED,
    )


def downgrade() -> None:
    online.drop_index("ix_episodes_pinned", "episodes")
