"""The reward that feedback has given is found by one look into an index, however many rewards its reply has."""

from migrations import online

revision = "20261125_0600"
down_revision = "20261125_0500"
branch_labels = None
depends_on = None


def upgrade() -> None:
    online.create_index("ix_rewards_feedback_seq_turn_id", "rewards", ["feedback_seq", "turn_id"])


def downgrade() -> None:
    online.drop_index("ix_rewards_feedback_seq_turn_id", "rewards")
