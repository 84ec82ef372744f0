"""An agent whose policy may use a calculator: it writes `<calc>6 * 7</calc>` and reads 42."""

import re
from typing import Any

MAX_CALLS = 4
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)


async def solve(problem: Any, session: Any) -> None:
    """Lets the policy write turns until one has no call."""
    for _ in range(MAX_CALLS):
        answer = await session.generate(stop=["</calc>"])
        calls = _CALL.findall(answer.text)
        if not calls:
            return
        session.append(await session.call("calculator", expression=calls[-1]))
    await session.generate()
