"""What a message tells a person to write is found in its sentence."""

from __future__ import annotations

import pytest

from tests.mistakes.remedies import assert_keys, ways_out


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Write optimizer.name=adamw, or leave it out.", [["optimizer.name=adamw"]]),
        ("Write model.weights=int8|nf4, or seed=2.", [["model.weights=int8"], ["model.weights=nf4"], ["seed=2"]]),
        (
            "Write distributed.zero=3 and distributed.engine=fsdp2.",
            [["distributed.zero=3", "distributed.engine=fsdp2"]],
        ),
        ("write distributed={engine: fsdp2, zero: 3}.", [["distributed={engine: fsdp2, zero: 3}"]]),
        ("Write data.train=FILE.", []),
        ("a.b=1 is wrong. Leave it out.", []),
    ],
)
def test_ways_out(message: str, expected: list[list[str]]) -> None:
    assert list(ways_out(message)) == expected


def test_a_part_of_a_key_is_found() -> None:
    with pytest.raises(AssertionError, match="zero=0: not a key"):
        assert_keys("Write zero=0.")
