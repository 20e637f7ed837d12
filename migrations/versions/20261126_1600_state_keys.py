"""Turns of episodes may name the state of the environment that they were in. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1600"
down_revision = "20261126_1500"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("state_key", sa.String(512), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "state_key")
