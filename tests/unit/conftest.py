import numpy as np
import pytest

from pacs_megatron.contracts import Prompt


@pytest.fixture
def make_prompt():
    def make(answer: str, prompt_id: str = "train/7") -> Prompt:
        return Prompt(
            id=prompt_id,
            text="<user>q</user>",
            token_ids=np.asarray([3, 1, 2], dtype=np.int32),
            answer=answer,
            problem="What is it?",
            solution="So \\boxed{5}.",
            source="train",
        )

    return make
