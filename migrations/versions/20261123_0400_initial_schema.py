"""Create every table.

Later changes take three revisions (expand, backfill, contract), so that old code runs during the migration.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "20261123_0400"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def create_partial_index(
    name: str, table: str, columns: list[str], where: str, *, sqlite: str | None = None, unique: bool = False
) -> None:
    """Create an index of the rows that meet a condition, which SQLite may need in another form than PostgreSQL."""
    sqlite_where = sa.text(sqlite or where)
    op.create_index(name, table, columns, unique=unique, postgresql_where=sa.text(where), sqlite_where=sqlite_where)


# What an UPDATE of an audit entry may change: the seal, once; or the content of an entry that may name a data subject,
# which becomes empty. {same} compares two lists of values, nulls included; {hex} matches 64 hexadecimal digits.
AUDIT_CHANGES = """
    (NEW.seq, NEW.project_id, NEW.actor, NEW.action, NEW.created_at)
        {same} (OLD.seq, OLD.project_id, OLD.actor, OLD.action, OLD.created_at)
    AND (
        (
            OLD.chain_hash IS NULL AND NEW.chain_hash IS NOT NULL AND NEW.chain_number IS NOT NULL
            AND (NEW.subject, NEW.reason, NEW.details, NEW.erased_sha256)
                {same} (OLD.subject, OLD.reason, OLD.details, OLD.erased_sha256)
        ) OR (
            (OLD.action = 'pin.set' OR OLD.action LIKE 'rater.%')
            AND (NEW.chain_number, NEW.chain_hash) {same} (OLD.chain_number, OLD.chain_hash)
            AND (NEW.subject = OLD.subject OR {hex}) AND NEW.reason IS NULL AND NEW.details = '{{}}'
            AND OLD.erased_sha256 IS NULL AND (NEW.erased_sha256 IS NULL) = (NEW.chain_hash IS NULL)
        )
    )
"""
AUDIT_ERROR = "audit entries cannot be changed or deleted"


def make_append_only() -> None:
    """Add triggers that refuse to delete audit entries, and to change them except as AUDIT_CHANGES says."""
    if op.get_bind().dialect.name == "sqlite":
        allowed = AUDIT_CHANGES.format(
            same="IS", hex="(length(NEW.subject) = 64 AND NEW.subject NOT GLOB '*[^0-9a-f]*')"
        )
        for event, condition in (("UPDATE", f"WHEN NOT ({allowed})"), ("DELETE", "")):
            op.execute(
                f"CREATE TRIGGER audit_{event.lower()} BEFORE {event} ON audit {condition} "
                f"BEGIN SELECT RAISE(ABORT, '{AUDIT_ERROR}'); END"
            )
        return
    allowed = AUDIT_CHANGES.format(same="IS NOT DISTINCT FROM", hex="NEW.subject ~ '^[0-9a-f]{64}$'")
    op.execute(f"""
        CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'UPDATE' THEN
                IF {allowed} THEN RETURN NEW; END IF;
            END IF;
            RAISE EXCEPTION '{AUDIT_ERROR}';
        END $$
    """)
    for events, level in (("UPDATE OR DELETE", "ROW"), ("TRUNCATE", "STATEMENT")):
        op.execute(
            f"CREATE TRIGGER audit_{level.lower()} BEFORE {events} ON audit "
            f"FOR EACH {level} EXECUTE FUNCTION refuse_audit_change()"
        )


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("details", JSON, nullable=False),
        sa.Column("chain_number", sa.Integer(), nullable=True),
        sa.Column("chain_hash", sa.String(length=64), nullable=True),
        sa.Column("erased_sha256", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_project_id"), "audit", ["project_id"])
    op.create_index("ix_audit_project_id_action_subject", "audit", ["project_id", "action", "subject"])
    create_partial_index("ix_audit_unsealed", "audit", ["project_id", "seq"], "chain_hash IS NULL")
    create_partial_index(
        "uq_audit_project_id_chain_number",
        "audit",
        ["project_id", "chain_number"],
        "chain_number IS NOT NULL",
        unique=True,
    )
    make_append_only()
    op.create_table(
        "audit_chains",
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_audit_chains")),
    )
    op.create_table(
        "engines",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("loaded", JSON, nullable=False),
        sa.Column("weights", sa.String(length=80), nullable=True),
        sa.Column("swapping_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_engines")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("train", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("token_secret", sa.String(length=64), nullable=True),
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
        sa.Column("name", sa.String(length=63), nullable=True),
        sa.Column("scopes", JSON, nullable=False),
        sa.Column("train", sa.Boolean(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("max_concurrency", sa.Integer(), nullable=True),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"])
    op.create_table(
        "datasets",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("num_rows", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_datasets_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_datasets_project_id_name")),
    )
    op.create_table(
        "policies",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("head_version_id", sa.String(length=48), nullable=True),
        sa.Column("rewards", JSON, nullable=True),
        sa.Column("rollouts", JSON, nullable=True),
        sa.Column("mode", sa.String(length=16), server_default="asynchronous", nullable=False),
        sa.Column("mode_reason", sa.Text(), nullable=True),
        sa.Column("mode_since", sa.Float(), nullable=True),
        sa.Column("kl_alarms", sa.Integer(), server_default="0", nullable=False),
        sa.Column("conversations", sa.String(length=16), server_default="follow", nullable=False),
        sa.Column("feedback_share", sa.Float(), nullable=True),
        sa.Column("sparse_feedback", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("feedback_measured_at", sa.Float(), nullable=True),
        sa.Column("canary", JSON, nullable=True),
        sa.Column("shadow", JSON, nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_policies_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_policies_project_id_name")),
    )
    op.create_index(op.f("ix_policies_project_id"), "policies", ["project_id"])
    op.create_table(
        "raters",
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=320), nullable=False),
        sa.Column("standing", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("num_up", sa.Integer(), nullable=False),
        sa.Column("num_down", sa.Integer(), nullable=False),
        sa.Column("agreement_weight", sa.Float(), nullable=False),
        sa.Column("disagreement_weight", sa.Float(), nullable=False),
        sa.Column("counted_day", sa.Integer(), nullable=False),
        sa.Column("num_today", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_raters_project_id_projects")),
        sa.PrimaryKeyConstraint("project_id", "name", name=op.f("pk_raters")),
    )
    op.create_index("ix_raters_project_id_standing", "raters", ["project_id", "standing"])
    op.create_table(
        "dataset_rows",
        sa.Column("dataset_id", sa.String(length=48), nullable=False),
        sa.Column("row_number", sa.Integer(), nullable=False),
        sa.Column("content", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_dataset_rows_dataset_id_datasets"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("dataset_id", "row_number", name=op.f("pk_dataset_rows")),
    )
    op.create_table(
        "reward_models",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("serve_when_fitted", sa.Boolean(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=True),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("num_pairs", sa.Integer(), nullable=True),
        sa.Column("num_thumbs", sa.Integer(), nullable=True),
        sa.Column("num_raters", sa.Integer(), nullable=True),
        sa.Column("last_feedback_seq", sa.Integer(), nullable=False),
        sa.Column("data_read_at", sa.Float(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("served_at", sa.Float(), nullable=True),
        sa.Column("tainted_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_reward_models_policy_id_policies")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reward_models")),
        sa.UniqueConstraint("policy_id", "number", name=op.f("uq_reward_models_policy_id_number")),
    )
    create_partial_index("ix_reward_models_open", "reward_models", ["policy_id"], "state = 'open'", unique=True)
    create_partial_index("ix_reward_models_serving", "reward_models", ["policy_id"], "state = 'serving'", unique=True)
    op.create_table(
        "rollout_plans",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("dataset_id", sa.String(length=48), nullable=False),
        sa.Column("dataset", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("passes", sa.Integer(), nullable=False),
        sa.Column("verifier", JSON, nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("max_tokens", sa.Integer(), nullable=False),
        sa.Column("prompts_per_version", sa.Integer(), nullable=True),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("pass_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=True),
        sa.Column("version_prompts", sa.Integer(), nullable=False),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_rollout_plans_policy_id_policies")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_rollout_plans_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout_plans")),
    )
    op.create_index("ix_rollout_plans_policy_id_created_at", "rollout_plans", ["policy_id", "created_at"])
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
        sa.Column("full_weights", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=True),
        sa.Column("probe", JSON, nullable=True),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("timings", JSON, nullable=False),
        sa.Column("shadow_since", sa.Float(), nullable=True),
        sa.Column("live_at", sa.Float(), nullable=True),
        sa.Column("tainted_at", sa.Float(), nullable=True),
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
    op.create_index(op.f("ix_versions_policy_id"), "versions", ["policy_id"])
    op.create_index(op.f("ix_versions_state"), "versions", ["state"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("parent_id", sa.String(length=48), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("num_raters", sa.Integer(), nullable=True),
        sa.Column("claimed_at", sa.Float(), nullable=True),
        sa.Column("version_id", sa.String(length=48), nullable=True),
        sa.Column("metrics", JSON, nullable=False),
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
    op.create_index(op.f("ix_batches_policy_id"), "batches", ["policy_id"])
    op.create_index(op.f("ix_batches_state"), "batches", ["state"])
    op.create_table(
        "deployments",
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("previous_version_id", sa.String(length=48), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=True),
        sa.Column("canary_version_id", sa.String(length=48), nullable=True),
        sa.Column("canary_share", sa.Float(), server_default="0", nullable=False),
        sa.Column("canary_since", sa.Float(), nullable=True),
        sa.Column("canary_watched", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.ForeignKeyConstraint(
            ["canary_version_id"], ["versions.id"], name=op.f("fk_deployments_canary_version_id_versions")
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_deployments_policy_id_policies")),
        sa.ForeignKeyConstraint(
            ["previous_version_id"], ["versions.id"], name=op.f("fk_deployments_previous_version_id_versions")
        ),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_deployments_version_id_versions")),
        sa.PrimaryKeyConstraint("policy_id", name=op.f("pk_deployments")),
    )
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
    op.create_index("ix_pins_policy_id_kind_subject", "pins", ["policy_id", "kind", "subject"], unique=True)
    op.create_index("ix_pins_project_id_kind_subject", "pins", ["project_id", "kind", "subject"])
    op.create_index(op.f("ix_pins_version_id"), "pins", ["version_id"])
    op.create_table(
        "turns",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("completion_id", sa.String(length=48), nullable=True),
        sa.Column("choice_index", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("route_reason", sa.String(length=16), server_default="stable", nullable=False),
        sa.Column("origin", sa.String(length=16), server_default="chat", nullable=False),
        sa.Column("conversation_id", sa.String(length=255), nullable=True),
        sa.Column("parent_id", sa.String(length=48), nullable=True),
        sa.Column("shadow_of_id", sa.String(length=48), nullable=True),
        sa.Column("prefix_reuse", sa.Text(), nullable=True),
        sa.Column("prefix_hash", sa.String(length=64), nullable=True),
        sa.Column("key_id", sa.String(length=48), nullable=True),
        sa.Column("end_user", sa.String(length=512), nullable=True),
        sa.Column("request_sha256", sa.String(length=64), nullable=True),
        sa.Column(
            "request_metadata",
            JSON,
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("engine", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("messages", JSON, nullable=False),
        sa.Column("sampling", JSON, nullable=False),
        sa.Column(
            "request_params",
            JSON,
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("output_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("reply", JSON, nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("num_output_tokens", sa.Integer(), nullable=True),
        sa.Column("length_penalty", sa.Float(), nullable=True),
        sa.Column(
            "weight_versions",
            sa.JSON(none_as_null=True).with_variant(
                postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), "postgresql"
            ),
            nullable=True,
        ),
        sa.Column("exclusion_reason", sa.Text(), nullable=True),
        sa.Column("first_token_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("processed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_turns_policy_id_policies")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_turns_project_id_projects")),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_turns_version_id_versions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
    )
    op.create_index("ix_turns_completion_id_choice_index", "turns", ["completion_id", "choice_index"], unique=True)
    create_partial_index("ix_turns_finished_at", "turns", ["finished_at"], "NOT processed", sqlite="processed = 0")
    op.create_index("ix_turns_key_id_request_sha256", "turns", ["key_id", "request_sha256"])
    op.create_index(op.f("ix_turns_parent_id"), "turns", ["parent_id"])
    op.create_index("ix_turns_project_id_conversation_id", "turns", ["project_id", "conversation_id", "created_at"])
    op.create_index("ix_turns_project_id_created_at", "turns", ["project_id", "created_at"])
    create_partial_index("ix_turns_project_id_end_user", "turns", ["project_id", "end_user"], "end_user IS NOT NULL")
    op.create_index("ix_turns_project_id_prefix_hash", "turns", ["project_id", "prefix_hash"])
    create_partial_index("ix_turns_shadow_of_id", "turns", ["shadow_of_id"], "shadow_of_id IS NOT NULL")
    op.create_index("ix_turns_state", "turns", ["state"])
    op.create_index("ix_turns_version_id_created_at", "turns", ["version_id", "created_at"])
    op.create_table(
        "feedback",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=True),
        sa.Column("conversation_id", sa.String(length=255), nullable=True),
        sa.Column("target", sa.String(length=300), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("raw_value", JSON, nullable=True),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("source_kind", sa.String(length=16), nullable=False),
        sa.Column("source_id", sa.String(length=255), nullable=True),
        sa.Column(
            "request_metadata",
            JSON,
            nullable=False,
        ),
        sa.Column("idempotency_key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("processed", sa.Boolean(), nullable=False),
        sa.Column("batch_id", sa.String(length=48), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_feedback_batch_id_batches")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_feedback_project_id_projects")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_feedback_turn_id_turns")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_id")),
        sa.UniqueConstraint("project_id", "idempotency_key", name=op.f("uq_feedback_project_id_idempotency_key")),
    )
    create_partial_index("ix_feedback_batch_id", "feedback", ["batch_id"], "batch_id IS NOT NULL")
    create_partial_index("ix_feedback_processed", "feedback", ["seq"], "NOT processed", sqlite="processed = 0")
    op.create_index("ix_feedback_project_id_conversation_id", "feedback", ["project_id", "conversation_id"])
    create_partial_index(
        "ix_feedback_project_id_source_id", "feedback", ["project_id", "source_id"], "source_id IS NOT NULL"
    )
    op.create_index("ix_feedback_project_id_target", "feedback", ["project_id", "target"])
    op.create_index(op.f("ix_feedback_turn_id"), "feedback", ["turn_id"])
    op.create_table(
        "judgements",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("source", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("details", JSON, nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_judgements_policy_id_policies")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_judgements_turn_id_turns")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_judgements")),
        sa.UniqueConstraint("turn_id", "source", name=op.f("uq_judgements_turn_id_source")),
    )
    create_partial_index("ix_judgements_due_at", "judgements", ["due_at"], "state = 'open'")
    op.create_index("ix_judgements_policy_id_source_settled_at", "judgements", ["policy_id", "source", "settled_at"])
    op.create_table(
        "reward_model_turns",
        sa.Column("reward_model_id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.ForeignKeyConstraint(
            ["reward_model_id"],
            ["reward_models.id"],
            name=op.f("fk_reward_model_turns_reward_model_id_reward_models"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_reward_model_turns_turn_id_turns")),
        sa.PrimaryKeyConstraint("reward_model_id", "turn_id", name=op.f("pk_reward_model_turns")),
    )
    op.create_index(op.f("ix_reward_model_turns_turn_id"), "reward_model_turns", ["turn_id"])
    op.create_table(
        "rewards",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("reward_source", sa.String(length=63), server_default="explicit", nullable=False),
        sa.Column("feedback_seq", sa.Integer(), nullable=True),
        sa.Column("rater", sa.String(length=320), nullable=True),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("weight", sa.Float(), server_default="1", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_rewards_turn_id_turns")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewards")),
        sa.UniqueConstraint("turn_id", "source", name=op.f("uq_rewards_turn_id_source")),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("plan_id", sa.String(length=48), nullable=True),
        sa.Column("pass_number", sa.Integer(), nullable=True),
        sa.Column("row_number", sa.Integer(), nullable=True),
        sa.Column("choice_index", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("engine", sa.String(length=63), nullable=True),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("duration_seconds", sa.Float(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["id"], ["turns.id"], name=op.f("fk_rollouts_id_turns")),
        sa.ForeignKeyConstraint(["plan_id"], ["rollout_plans.id"], name=op.f("fk_rollouts_plan_id_rollout_plans")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_rollouts_policy_id_policies")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint(
            "plan_id",
            "pass_number",
            "row_number",
            "choice_index",
            name=op.f("uq_rollouts_plan_id_pass_number_row_number_choice_index"),
        ),
    )
    create_partial_index("ix_rollouts_due_at", "rollouts", ["due_at"], "state = 'open'")
    op.create_index("ix_rollouts_policy_id_origin_settled_at", "rollouts", ["policy_id", "origin", "settled_at"])
    op.create_table(
        "samples",
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=False),
        sa.Column("reward", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("rule", sa.String(length=32), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("num_returns", sa.Integer(), server_default="0", nullable=False),
        sa.Column("batch_id", sa.String(length=48), nullable=True),
        sa.Column("ready_at", sa.Float(), server_default="0", nullable=False),
        sa.Column("conversation_id", sa.String(length=255), nullable=True),
        sa.Column("rater", sa.String(length=320), nullable=True),
        sa.Column("cluster", sa.String(length=32), nullable=True),
        sa.Column("group_id", sa.String(length=300), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_samples_batch_id_batches")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_samples_policy_id_policies")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_samples_turn_id_turns")),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name=op.f("fk_samples_version_id_versions")),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("pk_samples")),
    )
    op.create_index(op.f("ix_samples_batch_id"), "samples", ["batch_id"])
    create_partial_index("ix_samples_policy_id_ready_at", "samples", ["policy_id", "ready_at"], "state = 'open'")
    op.create_index("ix_samples_policy_id_state", "samples", ["policy_id", "state"])
    op.create_table(
        "turn_metadata",
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=512), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_turn_metadata_project_id_projects")),
        sa.ForeignKeyConstraint(
            ["turn_id"], ["turns.id"], name=op.f("fk_turn_metadata_turn_id_turns"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("turn_id", "key", name=op.f("pk_turn_metadata")),
    )
    op.create_index("ix_turn_metadata_project_id_key_value", "turn_metadata", ["project_id", "key", "value"])
    op.create_table(
        "batch_turns",
        sa.Column("batch_id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_batch_turns_batch_id_batches")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_batch_turns_turn_id_turns")),
        sa.PrimaryKeyConstraint("batch_id", "turn_id", name=op.f("pk_batch_turns")),
    )
    op.create_index(op.f("ix_batch_turns_turn_id"), "batch_turns", ["turn_id"])
    op.create_table(
        "feedback_ranks",
        sa.Column("feedback_seq", sa.Integer(), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["feedback_seq"], ["feedback.seq"], name=op.f("fk_feedback_ranks_feedback_seq_feedback")
        ),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_feedback_ranks_turn_id_turns")),
        sa.PrimaryKeyConstraint("feedback_seq", "turn_id", name=op.f("pk_feedback_ranks")),
    )
    op.create_index(op.f("ix_feedback_ranks_turn_id"), "feedback_ranks", ["turn_id"])


def downgrade() -> None:
    op.drop_table("feedback_ranks")
    op.drop_table("batch_turns")
    op.drop_table("turn_metadata")
    op.drop_table("samples")
    op.drop_table("rollouts")
    op.drop_table("rewards")
    op.drop_table("reward_model_turns")
    op.drop_table("judgements")
    op.drop_table("feedback")
    op.drop_table("turns")
    op.drop_table("pins")
    op.drop_table("deployments")
    op.drop_table("batches")
    op.drop_table("versions")
    op.drop_table("rollout_plans")
    op.drop_table("reward_models")
    op.drop_table("dataset_rows")
    op.drop_table("raters")
    op.drop_table("policies")
    op.drop_table("datasets")
    op.drop_table("api_keys")
    op.drop_table("projects")
    op.drop_table("engines")
    op.drop_table("audit_chains")
    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_audit_change")
