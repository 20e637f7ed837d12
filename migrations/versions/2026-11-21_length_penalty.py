"""What a reply's length costs, on the turn.

Revises: 35ede5d56b90
Old code still runs while this does: the column may be null, which is also what turns from before it hold.
"""

import sqlalchemy as sa
from alembic import op

revision = "b0c6d2f4a7e1"
down_revision = "35ede5d56b90"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("length_penalty", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "length_penalty")
