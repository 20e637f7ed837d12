"""The shape of adapters is fixed by the first version of an installation."""

from pathlib import Path

import pytest

from app.core.settings import DEMO_MODEL, Settings
from app.policies.adapter_shape import require_adapter_shape
from tests.support.adapters import make_adapter


def test_another_rank_than_that_of_the_versions_is_refused(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    require_adapter_shape(settings)
    make_adapter(settings.versions_dir / "shop-v1", DEMO_MODEL)
    require_adapter_shape(settings)
    with pytest.raises(ValueError, match=r"trainer\.lora has r = 16, .* have r = 8, .* or another `home`"):
        require_adapter_shape(settings.replace({"trainer.lora.r": 16}))
