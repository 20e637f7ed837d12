"""Training algorithms: the built-in ones, and the base class for algorithms of other packages."""

from alignment.algorithms.base import RLAlgorithm
from alignment.algorithms.registry import ALGORITHMS, build

__all__ = ["ALGORITHMS", "RLAlgorithm", "build"]
