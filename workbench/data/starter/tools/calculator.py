"""A calculator, as `reinforce/tools` offers it to the model."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
