"""Arithmetic expressions in plain and LaTeX notation are evaluated; what could take long is not."""

import subprocess
import sys

import pytest

from alignment.signals.math_expressions import evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (r"\frac{3}{4}", 0.75),
        (r"\frac34", 0.75),
        ("3/4", 0.75),
        ("1 3/4", 1.75),
        (r"1\frac{3}{4}", 1.75),
        ("1.2 × 10^3", 1200.0),
        ("10^{-3}", 0.001),
        (r"4\sqrt{2}", 5.656854249492381),
        ("√2", 1.4142135623730951),
        (r"\sqrt[3]{8}", 2.0),
        ("2π", 6.283185307179586),
        ("5!", 120.0),
        ("(2+3)*4", 20.0),
        (r"-\frac{1}{2}", -0.5),
        ("3 × -2", -6.0),
    ],
)
def test_value(expression: str, value: float) -> None:
    result = evaluate(expression)
    assert result is not None and float(result) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "+",
        "2*(3",
        "1/0",
        r"\sqrt{-1}",
        "x+1",
        r"\int 1",
        "import os",
        "3(4)",
        "(2)(3)",
        "2 10",
        "9^{9^9}",
        "((9^999)^999)",
        "2^(10)",
        "7^0.5",
        "99999!",
        "5!!",
        "9" * 60 + "+1",
        "1+" * 200 + "1",
    ],
)
def test_unreadable_ambiguous_or_expensive_expression_has_no_value(expression: str) -> None:
    assert evaluate(expression) is None


def test_service_does_not_import_the_library_before_it_is_needed() -> None:
    code = "import sys, app.main; sys.exit(bool({'math_verify', 'sympy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_library_does_not_import_torch() -> None:
    code = (
        "import sys; from alignment.signals.math_expressions import evaluate; "
        "evaluate('3/4'); sys.exit('math_verify' not in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
