"""States of policies: active, paused, archived, deleted."""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0320"
down_revision = "20261125_0310"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policies", sa.Column("state", sa.String(16), server_default="active", nullable=False))
    op.add_column("policies", sa.Column("state_reason", sa.Text(), nullable=True))
    op.add_column("policies", sa.Column("state_since", sa.Float(), nullable=True))


def downgrade() -> None:
    for column in ("state_since", "state_reason", "state"):
        op.drop_column("policies", column)
