"""Small sums: every one of them is a fact to learn."""

from tiny.relations.relation import Relation, Row, lines


def _arithmetic(largest: int, operator: str) -> tuple[Row, ...]:
    """Every `a operator b` with operands from 0 to `largest`; subtraction only where the result is not negative."""
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator]
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1) if operator != "-" or a >= b]
    return tuple({"a": str(a), "b": str(b), "result": str(compute(a, b))} for a, b in pairs)


SUMS = (
    Relation(
        "addition",
        _arithmetic(20, "+"),
        lines("""
            What is {a} + {b}?
            What's {a} + {b}?
            {a} + {b}
            {a} + {b} =
            {a} + {b} = ?
            {a}+{b}
            {a}+{b}=
            What is {a}+{b}?
            Calculate {a} + {b}.
            Compute {a} + {b}.
            {a} plus {b}
            What is {a} plus {b}?
            How much is {a} plus {b}?
            How much is {a} + {b}?
            Add {a} and {b}.
            What is the sum of {a} and {b}?
            Tell me what {a} + {b} is.
            What do you get when you add {a} and {b}?
            What does {a} + {b} equal?
            I have {a} coins and get {b} more. How many do I have?
        """),
        lines("""
            Could you work out {a} + {b}?
            I would like to know what {a} plus {b} is.
            {a} plus {b} makes how much?
            Please give me the sum of {a} and {b}.
            If I add {a} and {b}, what do I get?
        """),
        "{a} + {b} = {result}.",
        "{result}",
        3.2,
        40,
    ),
    Relation(
        "subtraction",
        _arithmetic(20, "-"),
        lines("""
            What is {a} - {b}?
            What's {a} - {b}?
            {a} - {b}
            {a} - {b} =
            {a} - {b} = ?
            {a}-{b}
            {a}-{b}=
            What is {a}-{b}?
            Calculate {a} - {b}.
            Compute {a} - {b}.
            {a} minus {b}
            What is {a} minus {b}?
            How much is {a} minus {b}?
            How much is {a} - {b}?
            Subtract {b} from {a}.
            What is the difference between {a} and {b}?
            Tell me what {a} - {b} is.
            What do you get when you take {b} from {a}?
            What does {a} - {b} equal?
            I have {a} coins and lose {b}. How many do I have?
        """),
        lines("""
            Could you work out {a} - {b}?
            I would like to know what {a} minus {b} is.
            {a} minus {b} makes how much?
            Please give me the difference between {a} and {b}.
        """),
        "{a} - {b} = {result}.",
        "{result}",
        2.2,
        30,
    ),
    Relation(
        "multiplication",
        _arithmetic(12, "*"),
        lines("""
            What is {a} * {b}?
            What's {a} * {b}?
            {a} * {b}
            {a} * {b} =
            {a} * {b} = ?
            {a}*{b}
            {a} x {b}
            What is {a} x {b}?
            Calculate {a} * {b}.
            Compute {a} * {b}.
            {a} times {b}
            What is {a} times {b}?
            How much is {a} times {b}?
            How much is {a} * {b}?
            Multiply {a} by {b}.
            Multiply {a} and {b}.
            What is the product of {a} and {b}?
            Tell me what {a} * {b} is.
            What do you get when you multiply {a} by {b}?
            What does {a} * {b} equal?
        """),
        lines("""
            Could you work out {a} * {b}?
            I would like to know what {a} times {b} is.
            {a} times {b} makes how much?
            Please give me the product of {a} and {b}.
        """),
        "{a} * {b} = {result}.",
        "{result}",
        2.0,
        30,
    ),
)
