"""The base class of settings. Torch-free."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base class of settings: immutable, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
