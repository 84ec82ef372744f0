"""Diversity of the correct responses to one problem (arXiv:2509.02522, equations 12 to 15).

`pacs-megatron diversity` reads the samples of evaluations. A score depends on the embedding model,
so every output names it.
"""

import io
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from pacs_megatron.errors import ConfigError, DataError, shown
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.runtime.files import check_distinct, has_fields, is_file, write_outputs
from pacs_megatron.runtime.json_reader import parse_json, read_object, read_text
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.workbench.evaluation.sample_file import is_sample, read_samples
from pacs_megatron.workbench.statistics import bootstrap_mean

Embedder = Callable[[Sequence[str]], np.ndarray]
"""Texts -> float [texts, dimension]."""
Vectors = Mapping[str, Mapping[str, np.ndarray]]
"""`<path> <benchmark>` -> `question_vectors`"""

HASHED = "hashed"
_DIMENSIONS = 1024
_NGRAM = 4
_BATCH = 8
_MAX_TOKENS = 8192
_CELLS = 48
_SIZE = 380


def question_vectors(
    correct_responses: Mapping[str, Sequence[str]], embed: Embedder
) -> dict[str, np.ndarray]:
    """Question id -> embeddings, float [correct responses, dimension]; [0, 0] with fewer than two
    correct responses.

    Raises DataError if an embedding has the wrong shape, is not finite or is zero.
    """
    found = {}
    for question, texts in sorted(correct_responses.items()):
        vectors = np.asarray(
            embed(texts) if len(texts) >= 2 else np.empty((0, 0)), dtype=np.float64
        )
        problem = ""
        if len(texts) >= 2 and (vectors.ndim != 2 or len(vectors) != len(texts)):
            problem = f"embeddings have shape {vectors.shape}, expected ({len(texts)}, dimension)"
        elif not np.isfinite(vectors).all() or not np.linalg.norm(vectors, axis=1).all():
            problem = "an embedding is zero or not finite and has no direction"
        if problem:
            raise DataError(f"diversity of {question}: {problem}; fix the embedding function")
        found[question] = vectors
    return found


def question_scores(vectors: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Question id -> mean of 1 - cos over all pairs of that question's correct responses, in [0,
    2].
    """
    scores = {}
    for question, found in vectors.items():
        if len(found):
            unit = found / np.linalg.norm(found, axis=1, keepdims=True)
            distances = 1.0 - (unit @ unit.T)[np.triu_indices(len(unit), k=1)]
            scores[question] = max(
                float(np.mean(distances)), 0.0
            )  # equal vectors have a cosine of 1 + rounding
    return scores


def load_embedder(name: str) -> tuple[str, Embedder]:
    """(description for outputs, embedder):

    `hashed`, or a model in the format of sentence-transformers, folder or hub id.

    A vector is that library's, without its last normalisation. Raises ConfigError.
    """
    if name == HASHED:
        return f"hashed {_NGRAM}-grams of characters: for tests, no semantic model", _hashed
    import torch
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()  # a report of unused tensors
    try:
        # Without this argument, transformers prompts on the terminal to run a model's code.
        tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="right", trust_remote_code=False
        )
        model = AutoModel.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True
        ).eval()
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        pooling, limit = _pooling(name)
        limit = min(
            limit, _MAX_TOKENS, tokenizer.model_max_length, model.config.max_position_embeddings
        )
    except (
        Exception
    ) as error:  # the library raises KeyError, SafetensorError, ... for damaged files
        reason = f"{type(error).__name__}: {shown(str(error), 200)}"
        raise ConfigError(
            f"--embedder {name}: {reason}; give the folder of an embedding model, or {HASHED}"
        ) from error

    def embed(texts: Sequence[str]) -> np.ndarray:
        found = []
        for start in range(0, len(texts), _BATCH):
            batch = list(texts[start : start + _BATCH])
            ids = tokenizer(
                batch, padding=True, truncation=True, max_length=limit, return_tensors="pt"
            ).to(model.device)
            with torch.inference_mode():
                states = model(**ids).last_hidden_state.float()
            mask = ids["attention_mask"]
            last = mask.sum(1, keepdim=True) - 1
            positions = torch.arange(mask.shape[1], device=mask.device)
            weights = {
                "mean": mask / (last + 1),
                "cls": positions.eq(0 * last),
                "lasttoken": positions.eq(last),
            }
            found.append(torch.einsum("bt,bth->bh", weights[pooling].float(), states).cpu().numpy())
        return np.concatenate(found)

    return f"{name}, pooling: {pooling}, at most {limit} tokens of a response", embed


def _pooling(name: str) -> tuple[str, int]:
    """(`mean`, `cls` or `lasttoken`, largest number of tokens) from the files of
    sentence-transformers.

    Raises ValueError for another pooling, and for a model with further layers.
    """
    from transformers.utils import cached_file

    modules = parse_json(read_text(Path(cached_file(name, "modules.json"))), "modules.json")
    layers = [module["type"].rpartition(".")[2] for module in modules]
    if layers not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"modules.json lists {layers}; expected Transformer, Pooling and perhaps Normalize"
        )
    config = read_object(Path(cached_file(name, "1_Pooling/config.json")))
    active = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    modes = config.get(
        "pooling_mode", [key[13:].removesuffix("_tokens").removesuffix("_token") for key in active]
    )
    if modes in ("mean", "cls", "lasttoken"):
        modes = [modes]
    if modes not in (["mean"], ["cls"], ["lasttoken"]):
        raise ValueError(
            f"1_Pooling/config.json has pooling {modes}; expected mean, cls or lasttoken"
        )
    limit = _MAX_TOKENS
    with suppress(OSError):  # Qwen3-Embedding has no such file
        limit = (
            read_object(Path(cached_file(name, "sentence_bert_config.json"))).get("max_seq_length")
            or limit
        )
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(
            f"sentence_bert_config.json has max_seq_length {limit}; expected a positive integer"
        )
    return modes[0], limit


def _hashed(texts: Sequence[str]) -> np.ndarray:
    vectors = np.zeros((len(texts), _DIMENSIONS))
    for row, text in enumerate(text.ljust(_NGRAM) for text in texts):
        for start in range(len(text) - _NGRAM + 1):
            vectors[
                row,
                zlib.crc32(text[start : start + _NGRAM].encode("utf-8", "replace")) % _DIMENSIONS,
            ] += 1
    return vectors


@report_wait("for the embeddings of all correct responses")
def embedded(
    paths: Sequence[Path], embedder: str, benchmarks: Collection[str] = ()
) -> tuple[str, Vectors]:
    """(description of the embedder, vectors) for runs or folders of results, of all benchmarks or
    of `benchmarks`.

    Raises DataError for a path without an evaluation.
    """
    check_distinct(
        [_results_of(path).parent for path in paths]
    )  # a run, and the folder of its evaluation
    responses = {path: _correct_responses(path) for path in paths}
    for path, found in responses.items():
        if missing := sorted(set(benchmarks) - set(found)):
            raise DataError(
                f"{path} has no samples of {missing[0]}; its benchmarks: {', '.join(sorted(found))}"
            )
    described, embed = load_embedder(embedder)  # a large model: after all other errors
    return described, {
        f"{path} {benchmark}": question_vectors(correct, embed)
        for path, found in responses.items()
        for benchmark, correct in sorted(found.items())
        if not benchmarks or benchmark in benchmarks
    }


def vectors_file(described: str, vectors: Vectors) -> bytes:
    """The content of an .npz file: one array per question, and `embedder`."""
    arrays = {
        f"{name}\t{question}": v.astype("f4")
        for name, found in vectors.items()
        for question, v in found.items()
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{"embedder": np.array(described), **arrays})  # type: ignore[arg-type]
    return buffer.getvalue()


def load_vectors(paths: Sequence[Path]) -> tuple[str, Vectors]:
    """(embedder, vectors) of all `paths`, files of `vectors_file`.

    Raises DataError for a damaged one.
    """
    described = ""
    found = defaultdict[str, dict[str, np.ndarray]](dict)
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as file:
                described = str(file["embedder"])
                for key in set(file.files) - {"embedder"}:
                    name, _, question = key.partition("\t")
                    found[name][question] = file[key].astype("f8")
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}: no embeddings ({type(error).__name__}); remove it, and run it again"
            ) from error
    return described, {name: dict(sorted(questions.items())) for name, questions in found.items()}


def diversity_page(described: str, vectors: Vectors) -> tuple[list[str], str]:
    """(lines to print, the page)."""
    lines = [f"embedder: {described}"]
    points = {}
    for name, questions in vectors.items():
        scores = list(question_scores(questions).values())
        text = "no question with two correct responses"
        if (score := bootstrap_mean(scores)) is not None:
            text = "{:.4f} [{:.4f}, {:.4f}]".format(*score) + f" over {len(scores)} questions"
            points[name] = np.concatenate([v for v in questions.values() if len(v)])
        lines.append(
            f"{name}: {text}, {len(questions) - len(scores)} with fewer than two correct responses"
        )
    body = f'<div class="card">{"".join(f"<p>{safe_text(line)}</p>" for line in lines)}</div>'
    return lines, page(
        "Diversity", f"<main><h1>Diversity</h1>{body}{_pictures(points) if points else ''}</main>"
    )


def _results_of(path: Path) -> Path:
    return (
        path / "results.json" if is_file(path / "results.json") else path / "eval" / "results.json"
    )


def _correct_responses(path: Path) -> dict[str, dict[str, list[str]]]:
    """Benchmark -> question -> its correct responses."""
    results = _results_of(path)
    if not is_file(results):
        raise DataError(
            f"{path}: no results.json; run `pacs-megatron eval` first, and give its folder or the "
            "run's"
        )
    name = read_object(results).get("samples")
    if (
        not isinstance(name, str)
        or Path(name).name != name
        or not (file := results.parent / name).is_file()
    ):
        raise DataError(
            f"{results}: samples={name!r} is no file of this folder; evaluate the run again"
        )
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    seen: set[str] = set()
    samples = read_samples(file)
    if not has_fields(next(samples, (b"", {}))[1], {"digest": str}):
        raise DataError(f"{file}:1 is no header of samples; evaluate the run again")
    for number, (_, record) in enumerate(samples, start=2):
        if not is_sample(record) or record["id"] in seen:
            raise DataError(
                f"{file}:{number} is no judged sample, or a repeated one; evaluate the run again"
            )
        seen.add(record["id"])
        correct = found[record["source"]][record["prompt_id"]]
        if record["label"] == 1:
            correct.append(record["response"])
    return found


def _pictures(points: Mapping[str, np.ndarray]) -> str:
    """One density per model and benchmark, over the first two principal components of all
    embeddings together.
    """
    unit = {name: v / np.linalg.norm(v, axis=1, keepdims=True) for name, v in points.items()}
    every = np.concatenate(list(unit.values()))
    centre = every.mean(axis=0)
    axes = np.linalg.svd(every - centre, full_matrices=False)[2][:2]
    flat = {name: (v - centre) @ axes.T for name, v in unit.items()}
    low = np.min([xy.min(axis=0) for xy in flat.values()], axis=0)
    span = np.maximum(np.max([xy.max(axis=0) for xy in flat.values()], axis=0) - low, 1e-9)
    figures = []
    for number, (name, xy) in enumerate(flat.items()):
        x, y = ((xy - low) / span).T
        density, _, _ = np.histogram2d(x, y, bins=_CELLS, range=((-0.05, 1.05), (-0.05, 1.05)))
        kernel = np.exp(-0.5 * (np.arange(-4, 5) / 1.5) ** 2)
        for axis in (0, 1):
            density = np.apply_along_axis(np.convolve, axis, density, kernel, mode="same")
        cell = _SIZE / _CELLS
        cells = "".join(
            f'<rect class="f{number % 8}" x="{i * cell:.1f}" y="{_SIZE - (j + 1) * cell:.1f}" '
            f'width="{cell:.1f}" '
            f'height="{cell:.1f}" opacity="{share:.2f}"/>'
            for (i, j), share in np.ndenumerate(density / density.max())
            if share > 0.01
        )
        figures.append(
            f"<figure><figcaption><span>{safe_text(name)} <small>PCA, {len(xy)} correct "
            "responses</small></span></figcaption>"
            f'<svg viewBox="0 0 {_SIZE} {_SIZE}" role="img" '
            f'aria-label="density">{cells}</svg></figure>'
        )
    return f'<h2>Density over the first two principal components</h2><div class="charts">{"".join(figures)}</div>'


def run_diversity(
    *, paths: list[Path], embedder: str, benchmark: list[str], out: Path, save: Path | None
) -> list[str]:
    """Writes the page to `out` and the embeddings to `save`; returns lines to print."""
    described, vectors = embedded(paths, embedder, benchmark)
    lines, text = diversity_page(described, vectors)
    outputs = [(out, text.encode())]
    if save is not None:
        outputs.append((save, vectors_file(described, vectors)))
    write_outputs(outputs)
    return [*lines, str(out)]
