"""The number that a reply answers, in the many ways to write it: right, wrong, or cannot tell."""

import threading
from decimal import Decimal

import pytest

from alignment.signals.number_answers import is_number, read_plain


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("It costs 7{,}250 francs.", "7250"),
        (r"\boxed{7{,}250}", "7250"),
        ("7.250", "7.25"),
        ("3/4", "0.75"),
        (r"\frac{3}{4}", "3/4"),
        (r"$\dfrac{3}{4}$", "0.75"),
        (r"\frac34", "0.75"),
        ("1 3/4", "1.75"),
        ("1½", "1.5"),
        ("¾ of it", "0.75"),
        ("12 m2", "12"),
        ("12 m^2", "12"),
        (r"$12\,\mathrm{m}^2$", "12"),
        ("12 m²", "12"),
        ("12,34,567", "1234567"),
        ("1'000'000.5", "1000000.5"),
        ("٧٢٥٠", "7250"),
        ("७२५०", "7250"),
        ("７２５０", "7250"),
        ("٧٬٢٥٠٫٥", "7250.5"),
        ("1.2 × 10^3", "1200"),
        (r"$1.2\times 10^{3}$", "1200"),
        ("1e3", "1000"),
        ("10³", "1000"),
        ("2^10", "1024"),
        ("12%", "0.12"),
        ("12%", "12"),
        ("12 percent", "12%"),
        ("1.2 million", "1200000"),
        ("3 million", "3"),
        ("7.25 thousand", "7250"),
        ("2 billion", "2000000000"),
        ("−7", "-7"),
        ("–7", "-7"),
        ("The answer is 12. I checked it with 3 methods.", "12"),
        ("3 × 4 = 12", "12"),
        ("10 - 7", "3"),
        ("3 bikes at 400 are 1,200.00 in all.", "1200"),
        ("That is 1.200,50 euros", "1200.5"),
        ("1.234.567,89", "1234567.89"),
        ("in 2024, 5 bikes.", "5"),
        ("1.5.", "1.5"),
        ("#### 42", "42"),
        ("so x = 5", "5"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{12\text{ km}}", "12"),
        (r"\boxed{\sqrt{2}}", "1.41421356"),
        (r"$2\pi$", r"2\pi"),
        ("$5", "5"),
        ("5$", "5"),
        ("USD 1,234.56", "1234.56"),
        ("€ 1.234,56", "1234.56"),
        ("Die Antwort ist 12,5.", "12.5"),
        ("**12**", "12"),
        ("The answer is **1,250**.", "1250"),
        (r"\(\frac{1}{2}\)", "0.5"),
        ("0.3333333", "1/3"),
        ("x_1 = 4", "4"),
        ("H2O weighs 18 g", "18"),
        (r"\boxed{7\,250}", "7250"),
        ("7 250", "7250"),
        ("7 250", "7250"),
        ("(7)", "7"),
        ("7!", "5040"),
        ("-3/4", "-0.75"),
        ("= 12", "12"),
        ("12 =", "12"),
        ("3, 4", "4"),
    ],
)
def test_right_number_is_read(text: str, reference: str) -> None:
    assert is_number(text, reference, 1e-6) is True


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (r"$\frac{9}{5}$", "1.8"),
        (r"$100\%$", "1"),
        (r"$\boxed{\frac{1}{3}}$", "1/3"),
        (r"$20\%$", "20"),
        ("0.2", "20%"),
        (r"\[ \boxed{4\sqrt{2}} \]", r"4\sqrt{2}"),
        (r"$\sqrt{3} + 2$", "3.7320508"),
        (r"10\,\text{cm}", "10"),
        ("1,000", "1000"),
        ("$1{,}000$", "1000"),
        (r"$\$ 1,000.00$", "1000"),
        ("The final answer is $24$. I hope it is correct.", "24"),
        (r"$-\frac{5}{2}$", "-2.5"),
        ("$2^{5}$", "32"),
        (r"$\frac{\sqrt{3}}{2}$", "0.8660254"),
        (r"Thus, $\boxed{5}$ and not 7", "5"),
        (r"$3\cdot 10^{-2}$", "0.03"),
        ("1/2", "$0.5$"),
        (r"$\tfrac{7}{8}$", "0.875"),
        ("$.5$", "0.5"),
        ("0.50", "1/2"),
        (r"$90^\circ$", "90"),
        (r"$\pi$", "3.14159265"),
        (r"\boxed{\text{12}}", "12"),
        ("$(5)$", "5"),
        (r"\fbox{6}", "6"),
        (r"$16\text{ units}^2$", "16"),
        (r"$\left(\frac{1}{2}\right)$", "0.5"),
        ("€1.000,50", "1000.5"),
        ("£3", "3"),
        (r"$x = \frac{4}{2} = 2$", "2"),
        ("33.3%", "33.3"),
        (r"$\frac{10}{4}$", "5/2"),
        (r"$5 \times 10^6$", "5000000"),
        ("$10!$", "3628800"),
        ("0001", "1"),
        ("12.", "12"),
        (r"$4 \frac12$", "4.5"),
        (r"\boxed{-\frac{3}{7}}", "-3/7"),
        (r"\boxed{\frac{-3}{7}}", "-3/7"),
        (r"\boxed{42}.", "42"),
        (r"\[\boxed{2.718}\]", "2.718"),
        (r"\boxed{1\,000\,000}", "1000000"),
        (r"\boxed{3}\text{ apples}", "3"),
        (r"$\frac{1}{2}\cdot\frac{1}{3}$", "1/6"),
    ],
)
def test_forms_that_math_verify_tests_are_read(text: str, reference: str) -> None:
    """Cases of our own, for each kind of answer to which the suite of math-verify has a number."""
    assert is_number(text, reference, 1e-6) is True


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("7{,}250", "250"),
        ("13%", "12%"),
        ("It is 13", "12"),
        ("-7", "7"),
        ("12 + 1 = 13", "12"),
        ("6.283", "2π"),
        ("It costs 13 francs", "12"),
        ("0.333", "1/3"),
        (r"$\frac{9}{4}$", "1.8"),
        (r"\boxed{5}", "6"),
        ("The final answer is 25.", "24"),
        (r"$-\frac{5}{2}$", "2.5"),
        ("20%", "30%"),
        (r"$\sqrt{3}$", "1.5"),
        (r"$2\pi$", "6.2"),
        ("1,001", "1000"),
        ("$2^{5}$", "25"),
        ("0.5", "1/3"),
        (r"\boxed{\frac{1}{3}}", "1/2"),
    ],
)
def test_another_number_is_wrong(text: str, reference: str) -> None:
    assert is_number(text, reference, 1e-6) is False


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("7.250", "7250"),
        ("1.2 km", "1200 m"),
        ("5.00 €", "500 cents"),
        ("12 hours", "720"),
        ("Twelve.", "12"),
        ("There are 3 bikes at 400. In all twelve hundred.", "1200"),
        ("It is 12 km (about 7.5 miles).", "12"),
        ("The answer is not 13. It is 12", "12"),
        ("5-7", "2"),
        ("between 5-7", "6"),
        ("2024-05-01", "5"),
        ("1.2.3", "3"),
        ("I do not know", "7"),
        ("It costs 1200 francs", "12"),
        ("一百", "100"),
        ("1,2,3", "3"),
        ("12 and 13", "12"),
        ("ten or so: 11", "12"),
    ],
)
def test_number_that_is_not_surely_read_is_neither_right_nor_wrong(text: str, reference: str) -> None:
    assert is_number(text, reference, 1e-6) is None


@pytest.mark.parametrize("reference", ["a dozen", "", "10:30", "x^2 + 1", "2024-05-01"])
def test_reference_without_a_readable_number(reference: str) -> None:
    with pytest.raises(ValueError, match="no number that can be read"):
        is_number("7", reference, 0)


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("7250", ["7250"]),
        ("7,250", ["7250", "7.250"]),
        ("7.250", ["7.250", "7250"]),
        ("0,125", ["0.125"]),
        ("1,234.5", ["1234.5"]),
        ("1.234,5", ["1234.5"]),
        ("1 234 567,89", ["1234567.89"]),
        ("12,34,567", ["1234567"]),
        ("1,2345,6789", ["123456789"]),
        ("1.2345", ["1.2345", "12345"]),
        ("1.5e-3", ["1.5e-3"]),
        ("1.2.3", []),
        ("1,2,3", []),
        ("12,345.678.9", []),
    ],
)
def test_readings_of_digits_with_marks(body: str, values: list[str]) -> None:
    assert [str(value) for value in read_plain(body)] == [str(Decimal(value)) for value in values]


def test_tolerance_is_relative() -> None:
    assert is_number("It is 1010", "1000", 0.02) is True
    assert is_number("It is 1010", "1000", 0.001) is False
    assert is_number(r"1.2 \times 10^3", "1200", 0) is True, "rounding of an evaluated expression is no difference"


def test_expressions_are_evaluated_in_any_thread() -> None:
    """Verifiers run in threads, where math-verify's own time limits fail."""
    results: list[bool | None] = []
    thread = threading.Thread(target=lambda: results.append(is_number(r"\boxed{\frac{3}{4}}", "0.75", 1e-6)))
    thread.start()
    thread.join()
    assert results == [True]


@pytest.mark.parametrize(
    "text",
    [
        "1/2 " * 2500,
        "9" * 10**6,
        "1," * 50_000,
        r"\boxed{" * 2000,
        "{" * 10_000,
        "7^9" * 3000,
        "((9^999)^999)^999",
        r"\boxed{9^{9^{9^9}}}",
        "999999!",
        "answer is " * 1000 + "1+" * 5000,
        "²" * 10_000,
        "a1" * 5000,
        "é" * 10_000,
    ],
)
@pytest.mark.timeout(120)  # work that grows with the square of a text's length would take hours
def test_hostile_texts_are_read(text: str) -> None:
    assert is_number(text, "7", 1e-6) is None
