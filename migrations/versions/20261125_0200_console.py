"""Sessions of the console, and links that sign in once."""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0200"
down_revision = "20261124_1120"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the two tables."""
    op.create_table(
        "console_sessions",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(48), nullable=False),
        sa.Column("csrf_token", sa.String(64), nullable=False),
        sa.Column("notice", sa.Text(), nullable=True),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_console_sessions_key_id_api_keys"),
        sa.PrimaryKeyConstraint("token_sha256", name="pk_console_sessions"),
    )
    op.create_index("ix_console_sessions_key_id", "console_sessions", ["key_id"])
    op.create_index("ix_console_sessions_expires_at", "console_sessions", ["expires_at"])
    op.create_table(
        "console_links",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(48), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_console_links_key_id_api_keys"),
        sa.PrimaryKeyConstraint("token_sha256", name="pk_console_links"),
    )


def downgrade() -> None:
    """Drop the two tables."""
    op.drop_table("console_links")
    op.drop_table("console_sessions")
