"""What a version's directory must be: sealed byte for byte, and an adapter the base model can take."""

from alignment.manifest.adapter import ADAPTER, ADAPTER_CONFIG, AdapterSpec, check_adapter
from alignment.manifest.directory import MANIFEST, publish_directory, seal, verify

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "MANIFEST",
    "AdapterSpec",
    "check_adapter",
    "publish_directory",
    "seal",
    "verify",
]
