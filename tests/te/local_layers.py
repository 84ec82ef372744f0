"""`python -m tests.te.local_layers FOLDER NAME...`: outcomes of the local layers, where Transformer Engine is hidden."""

import sys
from pathlib import Path

sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its import fails

from tests.te.cases import run, save_outcome  # noqa: E402

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        save_outcome(run(name, folder), folder / f"{name}.npz")
