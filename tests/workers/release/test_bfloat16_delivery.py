"""A model in bfloat16: an engine that has the parent's adapter under the version's name is found, update by update."""

from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.support.bfloat16_updates import DTYPE, make_updates
from tests.support.engine_model import make_tiny_model
from workers.release.verify_delivery import NotDelivered, Timings, require_delivered


def test_previous_adapter_under_the_new_name_is_found_and_the_new_one_is_not(tmp_path: Path) -> None:
    settings, model = Settings.model_validate({"dtype": DTYPE}), make_tiny_model(tmp_path / "model")
    updates = list(make_updates(model, tmp_path, 2, kl_target=settings.trainer.update_kl_target))
    for update in updates:
        timings = Timings()
        require_delivered(update.delivered, update.version, settings, timings)
        assert timings.seconds["probe_share"] > 0.5
        with pytest.raises(NotDelivered):
            require_delivered(update.parent_delivered, update.version, settings, Timings())
