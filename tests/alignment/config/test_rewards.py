"""Invalid reward settings are rejected."""

import pytest
from pydantic import ValidationError

from alignment.config.rewards import RewardsConfig


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [{"type": "explicit"}, {"type": "explicit"}],
        [{"type": "next_turn", "judge": "nobody"}],
        [{"type": "oracle"}],
        [{"type": "judge", "url": "ftp://judge", "model": "m"}],
        [{"type": "explicit", "labels": {"rude": -7}}],
    ],
)
def test_invalid_config_is_rejected(sources: list[dict[str, object]]) -> None:
    with pytest.raises(ValidationError):
        RewardsConfig.model_validate({"sources": sources})
