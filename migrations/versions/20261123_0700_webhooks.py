"""Webhook endpoints and the deliveries to them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "20261123_0700"
down_revision = "20261123_0600"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the two tables."""
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(48), nullable=False),
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("description", sa.String(255), nullable=True),
        sa.Column("events", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("previous_secret", sa.String(128), nullable=True),
        sa.Column("previous_secret_until", sa.Float(), nullable=True),
        sa.Column("last_chain_number", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failures", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failing_since", sa.Float(), nullable=True),
        sa.Column("retry_at", sa.Float(), nullable=True),
        sa.Column("disabled_at", sa.Float(), nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_webhook_endpoints_project_id_projects"),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_endpoints"),
    )
    op.create_index("ix_webhook_endpoints_project_id", "webhook_endpoints", ["project_id"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(48), nullable=False),
        sa.Column("endpoint_id", sa.String(48), nullable=False),
        sa.Column("audit_seq", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name="fk_webhook_deliveries_endpoint_id_webhook_endpoints",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_deliveries"),
        sa.UniqueConstraint("endpoint_id", "audit_seq", name="uq_webhook_deliveries_endpoint_id_audit_seq"),
    )
    is_open = sa.text("state = 'open'")
    op.create_index(
        "ix_webhook_deliveries_due_at",
        "webhook_deliveries",
        ["due_at"],
        postgresql_where=is_open,
        sqlite_where=is_open,
    )
    for columns in (["endpoint_id", "created_at"], ["settled_at"]):
        op.create_index(f"ix_webhook_deliveries_{'_'.join(columns)}", "webhook_deliveries", columns)


def downgrade() -> None:
    """Drop the two tables."""
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_endpoints")
