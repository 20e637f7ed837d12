"""One look into an index finds the first attempts of a group, whose version the next attempt starts on. Expand only."""

import sqlalchemy as sa

from migrations import online

revision = "20261126_1630"
down_revision = "20261126_1610"
branch_labels = None
depends_on = None
HAS_GROUP = sa.text("group_id IS NOT NULL")


def upgrade() -> None:
    online.create_index(
        "ix_episodes_of_group",
        "episodes",
        ["project_id", "group_id", "created_at", "id"],
        postgresql_where=HAS_GROUP,
        sqlite_where=HAS_GROUP,
    )


def downgrade() -> None:
    online.drop_index("ix_episodes_of_group", "episodes")
