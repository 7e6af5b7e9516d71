import pytest

from rft.rollout.environment.builtin.calculator import Calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37*48", "1776"), (" 7 // 2 + -1", "2"), ("(1+2)/4", "0.75"), ("6/3", "2"), ("10 % 4", "2"), ("+2.5*2", "5")],
)
def test_arithmetic(expression, value):
    assert Calculator().calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("1e300*1e300", "not finite"),
        ("9**9**9", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("'a'*9", "only numbers"),
        ("True+1", "only numbers"),
        ("1+", "is no arithmetic expression"),
        ("(" * 150, "is no arithmetic expression"),
        ("1" * 201, "at most 200 characters"),
        ("9" * 99 + "*" + "9" * 99, "more than 100 digits"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        Calculator().calculate(expression)
