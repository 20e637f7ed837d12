"""Who gets which version: pins, a canary beside the pointer, sticky conversations, and why a turn was routed as it was.

Revises: f72a3c9e5d43
Old code still runs while this does: what is new may be null or has a default. All turns from before count as the
pointer's. A version's turns are found by their time, too: whoever writes turns waits until that index is built, or
builds it before (`CREATE INDEX CONCURRENTLY`, under this name).
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "083b4d1f6e54"
down_revision = "f72a3c9e5d43"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    op.add_column("turns", sa.Column("routed", sa.String(length=16), server_default="stable", nullable=False))
    op.add_column("policies", sa.Column("conversations", sa.String(length=16), server_default="follow", nullable=False))
    op.add_column("policies", sa.Column("canary", JSON, nullable=True))
    with op.batch_alter_table("deployments") as table:
        table.add_column(sa.Column("canary_version_id", sa.String(length=48), nullable=True))
        table.add_column(sa.Column("canary_share", sa.Float(), server_default="0", nullable=False))
        table.add_column(sa.Column("canary_since", sa.Float(), nullable=True))
        table.add_column(sa.Column("canary_watched", sa.Boolean(), server_default=sa.false(), nullable=False))
        table.create_foreign_key(
            op.f("fk_deployments_canary_version_id_versions"), "versions", ["canary_version_id"], ["id"]
        )
    op.create_index("ix_turns_version_id_created_at", "turns", ["version_id", "created_at"], if_not_exists=True)
    op.drop_index("ix_turns_version_id", "turns")
    _pins()


def _pins() -> None:
    op.create_table(
        "pins",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=512), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("actor", sa.String(length=63), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_pins_policy_id_policies")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_pins_project_id_projects")),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_pins_version_id_versions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pins")),
    )
    op.create_index("ix_pins_version_id", "pins", ["version_id"])
    op.create_index("ix_pins_policy_id_kind_subject", "pins", ["policy_id", "kind", "subject"], unique=True)
    op.create_index("ix_pins_project_id_kind_subject", "pins", ["project_id", "kind", "subject"])


def downgrade() -> None:
    op.drop_table("pins")
    op.create_index("ix_turns_version_id", "turns", ["version_id"])
    op.drop_index("ix_turns_version_id_created_at", "turns")
    with op.batch_alter_table("deployments") as table:
        table.drop_constraint(op.f("fk_deployments_canary_version_id_versions"), type_="foreignkey")
        for name in ("canary_version_id", "canary_share", "canary_since", "canary_watched"):
            table.drop_column(name)
    for name in ("canary", "conversations"):
        op.drop_column("policies", name)
    op.drop_column("turns", "routed")
