"""first tables

Revises:
Old code still runs while this does: expand now, backfill apart, contract later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "69896015c91c"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "audit",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column(
            "details", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
    )
    op.create_table(
        "engines",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column(
            "loaded", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_engines")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("prefix", sa.String(length=24), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column(
            "scopes", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_api_keys_project_id"), ["project_id"], unique=False)

    op.create_table(
        "policies",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("head_version_id", sa.String(length=48), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_policies_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_policies_project_id_name")),
    )
    with op.batch_alter_table("policies", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_policies_project_id"), ["project_id"], unique=False)

    op.create_table(
        "versions",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.String(length=48), nullable=True),
        sa.Column("batch_id", sa.String(length=48), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("adapter_name", sa.String(length=80), nullable=True),
        sa.Column("adapter_path", sa.Text(), nullable=True),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=True),
        sa.Column(
            "probe", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=True
        ),
        sa.Column(
            "metrics", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column(
            "timings", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("live_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["parent_id"], ["versions.id"], name=op.f("fk_versions_parent_id_versions")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_versions_policy_id_policies")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_versions")),
        sa.UniqueConstraint("adapter_name", name=op.f("uq_versions_adapter_name")),
        sa.UniqueConstraint("policy_id", "number", name=op.f("uq_versions_policy_id_number")),
    )
    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_versions_policy_id"), ["policy_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_versions_state"), ["state"], unique=False)

    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("parent_id", sa.String(length=48), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=True),
        sa.Column(
            "metrics", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["parent_id"], ["versions.id"], name=op.f("fk_batches_parent_id_versions")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_batches_policy_id_policies")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_batches_policy_id"), ["policy_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_batches_state"), ["state"], unique=False)

    op.create_table(
        "deployments",
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("previous_version_id", sa.String(length=48), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("moved_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_deployments_policy_id_policies")),
        sa.ForeignKeyConstraint(
            ["previous_version_id"], ["versions.id"], name=op.f("fk_deployments_previous_version_id_versions")
        ),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_deployments_version_id_versions")),
        sa.PrimaryKeyConstraint("policy_id", name=op.f("pk_deployments")),
    )
    op.create_table(
        "turns",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("engine", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column(
            "messages", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column(
            "sampling", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("output_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column(
            "reply", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=True
        ),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("num_output_tokens", sa.Integer(), nullable=True),
        sa.Column("flaw", sa.Text(), nullable=True),
        sa.Column("first_token_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_turns_policy_id_policies")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_turns_project_id_projects")),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_turns_version_id_versions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
    )
    with op.batch_alter_table("turns", schema=None) as batch_op:
        batch_op.create_index("ix_turns_project_id_created_at", ["project_id", "created_at"], unique=False)
        batch_op.create_index("ix_turns_state", ["state"], unique=False)
        batch_op.create_index(batch_op.f("ix_turns_version_id"), ["version_id"], unique=False)

    op.create_table(
        "feedback",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("source_kind", sa.String(length=16), nullable=False),
        sa.Column("source_id", sa.String(length=255), nullable=True),
        sa.Column(
            "details", sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql"), nullable=False
        ),
        sa.Column("idempotency_key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("curated", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_feedback_project_id_projects")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_feedback_turn_id_turns")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_id")),
        sa.UniqueConstraint("project_id", "idempotency_key", name=op.f("uq_feedback_project_id_idempotency_key")),
    )
    with op.batch_alter_table("feedback", schema=None) as batch_op:
        batch_op.create_index("ix_feedback_curated", ["curated"], unique=False)
        batch_op.create_index(batch_op.f("ix_feedback_turn_id"), ["turn_id"], unique=False)

    op.create_table(
        "rewards",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_rewards_turn_id_turns")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewards")),
        sa.UniqueConstraint("turn_id", "source", name=op.f("uq_rewards_turn_id_source")),
    )
    op.create_table(
        "samples",
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("reward", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("batch_id", sa.String(length=48), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_samples_batch_id_batches")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_samples_policy_id_policies")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_samples_turn_id_turns")),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_samples_version_id_versions")),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("pk_samples")),
    )
    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_samples_batch_id"), ["batch_id"], unique=False)
        batch_op.create_index("ix_samples_policy_id_state", ["policy_id", "state"], unique=False)


def downgrade() -> None:

    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.drop_index("ix_samples_policy_id_state")
        batch_op.drop_index(batch_op.f("ix_samples_batch_id"))

    op.drop_table("samples")
    op.drop_table("rewards")
    with op.batch_alter_table("feedback", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_feedback_turn_id"))
        batch_op.drop_index("ix_feedback_curated")

    op.drop_table("feedback")
    with op.batch_alter_table("turns", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_turns_version_id"))
        batch_op.drop_index("ix_turns_state")
        batch_op.drop_index("ix_turns_project_id_created_at")

    op.drop_table("turns")
    op.drop_table("deployments")
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_batches_state"))
        batch_op.drop_index(batch_op.f("ix_batches_policy_id"))

    op.drop_table("batches")
    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_versions_state"))
        batch_op.drop_index(batch_op.f("ix_versions_policy_id"))

    op.drop_table("versions")
    with op.batch_alter_table("policies", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_policies_project_id"))

    op.drop_table("policies")
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_api_keys_project_id"))

    op.drop_table("api_keys")
    op.drop_table("projects")
    op.drop_table("engines")
    op.drop_table("audit")
