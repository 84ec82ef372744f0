from pathlib import Path

import pytest

from pacs_megatron.config.schema import DataOptions, TrainOptions
from tests.support.tiny_models import save_tokenizer

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "problems"
SUFFIX = r"Please reason step by step, and put your final answer within \boxed{}."


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    from pacs_megatron.data import load_tokenizer

    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture
def samples():
    return SAMPLES


@pytest.fixture
def data_options():
    def make(**changes):
        return DataOptions(train=TrainOptions(path="unused.json", preset="deepscaler"), **changes)

    return make
