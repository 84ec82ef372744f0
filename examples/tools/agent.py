"""Agents whose policy may use tools: it writes `<calc>6 * 7</calc>` and reads 42."""

import re
from typing import Any

MAX_CALLS = 4
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_CALL_OF_TWO = re.compile(r"<(calc|python)>(.*?)</\1>", re.DOTALL)


async def solve(problem: Any, session: Any) -> None:
    """Lets the policy write turns until one has no call."""
    for _ in range(MAX_CALLS):
        answer = await session.generate(stop=["</calc>"])
        calls = _CALL.findall(answer.text)
        if not calls:
            return
        session.append(await session.call("calculator", expression=calls[-1]))
    await session.generate()


async def solve_with_python(problem: Any, session: Any) -> None:
    """Same as `solve`, also with programs: `<python>print(6 * 7)</python>`."""
    for _ in range(MAX_CALLS):
        answer = await session.generate(stop=["</calc>", "</python>"])
        calls = _CALL_OF_TWO.findall(answer.text)
        if not calls:
            return
        [*_, (kind, text)] = calls
        if kind == "calc":
            result = await session.call("calculator", expression=text)
        else:
            result = await session.call("python", code=text)
        session.append(result)
    await session.generate()
