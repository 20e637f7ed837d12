"""An index finds the open samples of old versions, so that the assembly does not read the others. Expand only."""

import sqlalchemy as sa

from migrations import online

revision = "20261127_0720"
down_revision = "20261127_0710"
branch_labels = None
depends_on = None
IS_OPEN = sa.text("state = 'open'")


def upgrade() -> None:
    online.create_index(
        "ix_samples_of_versions",
        "samples",
        ["policy_id", "is_automated", "version_id", "turn_id"],
        postgresql_where=IS_OPEN,
        sqlite_where=IS_OPEN,
    )


def downgrade() -> None:
    online.drop_index("ix_samples_of_versions", "samples")
