"""`compare`: the comparison of runs, as text, page and files."""

from pathlib import Path

from pacs_megatron.runtime.files import write_outputs
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.workbench.compare import page
from pacs_megatron.workbench.compare.compare import compare
from pacs_megatron.workbench.evaluation.results import aligned


def run_compare(*, runs: list[Path], out: Path, **files: Path | None) -> list[str]:
    """Writes the page to `out` and each of `files`; returns lines to print.

    Args:
        runs: folders of runs.
        out: the page.
        files: format (json, csv, latex) -> file, None where it is not wanted.
    """
    with report_wait("for the runs to be compared"):
        comparison = compare(runs)
        paths = {"html": out}
        paths |= {form: path for form, path in files.items() if path is not None}
        outputs = [
            (path, getattr(page, f"compare_{form}")(comparison).encode())
            for form, path in paths.items()
        ]
    write_outputs(outputs)
    names = []
    for method in comparison.methods:
        runs_of_method = ", ".join(run.name for run in method.runs)
        names.append(f"{method.label}: {runs_of_method}")
    table = aligned(page.progress_rows(comparison))
    return [*names, "", table, "", *comparison.sentences(), str(out)]
