"""A game of three turns: the policy guesses a digit and reads `higher` or `lower`."""

import zlib
from typing import Any


def digit_of(prompt_id: str) -> int:
    """The digit to guess; no text of the conversation has it."""
    return zlib.crc32(prompt_id.encode()) % 10


async def solve(problem: Any, session: Any) -> None:
    """Up to three guesses."""
    digit = digit_of(problem.id)
    for _ in range(3):
        guess = (await session.generate(max_tokens=8)).text.strip()
        if guess == str(digit):
            return
        is_low = guess.isdecimal() and int(guess) < digit
        session.append("higher" if is_low else "lower")


def reward(sample: Any) -> float:
    """1 for a right last guess, more if it was an early one."""
    is_right = sample.turns[-1].text.strip() == str(digit_of(sample.prompt_id))
    num_messages = sum(turn.role == "environment" for turn in sample.turns)
    return is_right * (1.5 - 0.25 * num_messages)
