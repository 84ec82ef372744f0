"""docs/scale.md has the tables of benchmarks/scale.py, and they agree with arithmetic by hand."""

from pathlib import Path

import pytest

from benchmarks import scale

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_of_the_script() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    missing = [table for table in scale.tables() if table not in page]
    assert not missing, "python benchmarks/scale.py prints the tables of docs/scale.md"


def test_shares_on_1024_gpus_by_hand() -> None:
    """131,072 samples of 0.15 x 1,024 + 0.45 x 8,192 tokens; 512 ranks, 256 servers."""
    size = scale.size_of(1024, 16_384)
    seconds = {part.name: part.seconds(size, scale.LIKELY) for part in scale.PARTS}

    # 2.2949 ms a response of 4,096 tokens, of which 1.9531 ms are for its tokens.
    assert seconds["driver"] == pytest.approx(131_072 * (0.0019531 * 0.9 + 0.0003418), rel=1e-3)
    assert seconds["rank 0"] == pytest.approx(0.64 * 4 * 16 * 0.9, rel=1e-3)
    assert seconds["verifiers: math"] == pytest.approx(29.3, rel=1e-3)
    # Of 14.768 billion bf16 parameters: three quarters over NVLink, seven times their bytes in
    # memory; one copy over a link of 20 GB/s, and 56 requests. Only the first bucket is gathered
    # with nothing beside it.
    gathered = 29.5366 * (0.75 / 337.5 + 7 / 2010)
    sync = gathered / 56 + 29.5366 / 20 + 56 * 0.005
    assert seconds["weight sync"] == pytest.approx(sync, rel=1e-2)

    # In GB: facts in 9 rounds, ids and log-probs, three statistics of 32,768 samples there and
    # back. Messages: to 128 replicas for 4 updates, and 2 * 511 of each statistic.
    sent = 9 * 131_072 * 73 + 131_072 * 4 * (153.6 + 2 * 3686.4) + 3 * 2 * 32_768 * 16
    messages = 128 * 4 + 3 * 2 * 511
    assert seconds["gloo payloads"] == pytest.approx(sent / 1e9 + messages * 2e-4, rel=1e-3)

    # 614.07 s on 1,024 GPUs, a failure in 50,700 GPU-hours; five steps, 600 s, 206.76 GB at 2 GB/s.
    failures = 614.07 * 1024 / (50_700 * 3600)
    assert seconds["requeue"] == pytest.approx(failures * (5 * 614.07 + 600 + 103.38), rel=1e-3)
    assert seconds["checkpoint"] == pytest.approx(10.338, rel=1e-3)
