"""Conversations, choices and metadata of turns; typed feedback; keys with limits; datasets.

Revises: 69896015c91c
Old code still runs while this does: what is new may be null or has a default.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "35ede5d56b90"
down_revision = "69896015c91c"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    _datasets()
    _keys()
    _turns()
    _feedback()


def _datasets() -> None:
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
        "dataset_rows",
        sa.Column("dataset_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("content", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_dataset_rows_dataset_id_datasets"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("dataset_id", "number", name=op.f("pk_dataset_rows")),
    )


def _keys() -> None:
    op.add_column("audit", sa.Column("project_id", sa.String(length=48), nullable=True))
    op.create_index("ix_audit_project_id", "audit", ["project_id"])
    op.add_column("projects", sa.Column("train", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("projects", sa.Column("token_secret", sa.String(length=64), nullable=True))
    op.add_column("api_keys", sa.Column("name", sa.String(length=63), nullable=True))
    op.add_column("api_keys", sa.Column("train", sa.Boolean(), nullable=True))
    op.add_column("api_keys", sa.Column("requests_per_minute", sa.Integer(), nullable=True))
    op.add_column("api_keys", sa.Column("max_concurrency", sa.Integer(), nullable=True))
    op.add_column("api_keys", sa.Column("expires_at", sa.Float(), nullable=True))


def _turns() -> None:
    empty = sa.text("'{}'")
    for column in (
        sa.Column("completion_id", sa.String(length=48), nullable=True),
        sa.Column("choice_index", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("conversation_id", sa.String(length=255), nullable=True),
        sa.Column("parent_id", sa.String(length=48), nullable=True),
        sa.Column("continuity", sa.Text(), nullable=True),
        sa.Column("thread", sa.String(length=64), nullable=True),
        sa.Column("key_id", sa.String(length=48), nullable=True),
        sa.Column("end_user", sa.String(length=512), nullable=True),
        sa.Column("request_sha256", sa.String(length=64), nullable=True),
        sa.Column("details", JSON, nullable=False, server_default=empty),
        sa.Column("asked", JSON, nullable=False, server_default=empty),
        sa.Column("deleted_at", sa.Float(), nullable=True),
    ):
        op.add_column("turns", column)
    op.execute("UPDATE turns SET completion_id = id WHERE completion_id IS NULL")
    op.create_index("ix_turns_completion_id_choice_index", "turns", ["completion_id", "choice_index"], unique=True)
    op.create_index("ix_turns_project_id_conversation_id", "turns", ["project_id", "conversation_id", "created_at"])
    op.create_index("ix_turns_parent_id", "turns", ["parent_id"])
    op.create_index("ix_turns_project_id_thread", "turns", ["project_id", "thread"])
    op.create_index("ix_turns_key_id_request_sha256", "turns", ["key_id", "request_sha256"])
    op.create_table(
        "turn_pairs",
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=512), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_turn_pairs_project_id_projects")),
        sa.ForeignKeyConstraint(
            ["turn_id"], ["turns.id"], name=op.f("fk_turn_pairs_turn_id_turns"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("turn_id", "key", name=op.f("pk_turn_pairs")),
    )
    op.create_index("ix_turn_pairs_project_id_key_value", "turn_pairs", ["project_id", "key", "value"])


def _feedback() -> None:
    with op.batch_alter_table("feedback") as table:  # SQLite must copy the table to make a column nullable
        table.add_column(sa.Column("conversation_id", sa.String(length=255), nullable=True))
        table.add_column(sa.Column("target", sa.String(length=300), nullable=True))
        table.add_column(sa.Column("said", JSON, nullable=True))
        table.alter_column("turn_id", existing_type=sa.String(length=48), nullable=True)
        table.alter_column("value", existing_type=sa.Float(), nullable=True)
    op.execute("UPDATE feedback SET target = turn_id WHERE target IS NULL")
    op.create_index("ix_feedback_project_id_target", "feedback", ["project_id", "target"])
    op.create_index("ix_feedback_project_id_conversation_id", "feedback", ["project_id", "conversation_id"])
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
    op.create_index("ix_feedback_ranks_turn_id", "feedback_ranks", ["turn_id"])


def downgrade() -> None:
    """Feedback that the older schema cannot hold (no turn, or no number) is lost."""
    op.drop_table("feedback_ranks")
    op.drop_index("ix_feedback_project_id_target", "feedback")
    op.drop_index("ix_feedback_project_id_conversation_id", "feedback")
    op.execute("DELETE FROM feedback WHERE turn_id IS NULL OR value IS NULL")
    with op.batch_alter_table("feedback") as table:
        table.alter_column("value", existing_type=sa.Float(), nullable=False)
        table.alter_column("turn_id", existing_type=sa.String(length=48), nullable=False)
        for name in ("said", "target", "conversation_id"):
            table.drop_column(name)
    op.drop_table("turn_pairs")
    for index in (
        "completion_id_choice_index",
        "parent_id",
        "project_id_conversation_id",
        "project_id_thread",
        "key_id_request_sha256",
    ):
        op.drop_index(f"ix_turns_{index}", "turns")
    columns = (
        "completion_id choice_index conversation_id parent_id continuity thread key_id end_user request_sha256 "
        "details asked deleted_at"
    )
    for name in columns.split():
        op.drop_column("turns", name)
    op.drop_index("ix_audit_project_id", "audit")
    op.drop_column("audit", "project_id")
    for name in ("name", "train", "requests_per_minute", "max_concurrency", "expires_at"):
        op.drop_column("api_keys", name)
    for name in ("train", "token_secret"):
        op.drop_column("projects", name)
    op.drop_table("dataset_rows")
    op.drop_table("datasets")
