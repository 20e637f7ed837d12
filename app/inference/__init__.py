"""Inference: what an engine must do (`engine`), and a package for each kind of engine that does it.

Only the pool imports those packages: everything else works with the protocol.
"""
