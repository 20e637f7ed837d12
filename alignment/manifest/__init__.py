"""What a version's directory must be: sealed byte for byte, and an adapter, or weights, that the engine can take."""

from alignment.manifest.adapter import ADAPTER, ADAPTER_CONFIG, AdapterSpec, check_adapter
from alignment.manifest.directory import MANIFEST, Description, publish_directory, seal, sealed, unlike, verify
from alignment.manifest.weights import WEIGHTS, WeightsSpec, check_weights

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
