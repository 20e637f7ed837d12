"""What a version's directory must be: sealed byte for byte, and an adapter, or weights, that the engine can take."""

from alignment.artifacts.adapter_spec import ADAPTER, ADAPTER_CONFIG, AdapterSpec, check_adapter
from alignment.artifacts.full_weights_spec import WEIGHTS, WeightsSpec, check_weights
from alignment.artifacts.manifest import MANIFEST, Description, publish_directory, seal, sealed, unlike, verify

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "MANIFEST",
    "WEIGHTS",
    "AdapterSpec",
    "Description",
    "WeightsSpec",
    "check_adapter",
    "check_weights",
    "publish_directory",
    "seal",
    "sealed",
    "unlike",
    "verify",
]
