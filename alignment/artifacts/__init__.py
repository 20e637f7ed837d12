"""Version directories: the manifest, and what adapters and full weights must contain to be loaded by an engine."""

from alignment.artifacts.adapter_spec import ADAPTER, ADAPTER_CONFIG, AdapterSpec, check_adapter
from alignment.artifacts.full_weights_spec import WEIGHTS, WeightsSpec, check_weights
from alignment.artifacts.manifest import (
    MANIFEST,
    FileEntry,
    is_modified,
    publish_directory,
    read_manifest,
    verify,
    write_manifest,
)

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "MANIFEST",
    "WEIGHTS",
    "AdapterSpec",
    "FileEntry",
    "WeightsSpec",
    "check_adapter",
    "check_weights",
    "is_modified",
    "publish_directory",
    "read_manifest",
    "verify",
    "write_manifest",
]
