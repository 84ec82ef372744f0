"""Diversity of the correct responses to one problem (arXiv:2509.02522, equations 12 to 15).

`pacs-megatron diversity` reads the samples of evaluations. A score depends on the embedding model,
so every output names it.
"""

import io
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.errors import ConfigError, DataError, shown
from pacs_megatron.observability.page import NUM_COLOURS, page, safe_text
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
_POOLINGS = ("mean", "cls", "lasttoken")

# The pictures: cells a side, pixels a side, and the Gaussian that smooths the density.
_CELLS = 48
_SIZE = 380
_KERNEL = np.exp(-0.5 * (np.arange(-4, 5) / 1.5) ** 2)
_MIN_SHARE = 0.01
"""A cell with at most this share of the largest density is not drawn."""


def run_diversity(
    *, paths: list[Path], embedder: str, benchmark: list[str], out: Path, save: Path | None
) -> list[str]:
    """Writes the page to `out` and the embeddings to `save`; returns lines to print."""
    description, vectors = embedded(paths, embedder, benchmark)
    lines, text = diversity_page(description, vectors)
    outputs = [(out, text.encode())]
    if save is not None:
        outputs.append((save, vectors_file(description, vectors)))
    write_outputs(outputs)
    return [*lines, str(out)]


# ------------------------------------------------------------------------------------------ scores
def question_vectors(
    correct_responses: Mapping[str, Sequence[str]], embed: Embedder
) -> dict[str, np.ndarray]:
    """The embeddings of each question's correct responses.

    Args:
        correct_responses: question id -> texts.
        embed: receives all texts of one question.

    Returns:
        Question id -> float64 [correct responses, dimension]; [0, 0] with fewer than two correct
        responses.

    Raises:
        DataError: an embedding has the wrong shape, is not finite or is zero.
    """
    vectors_of_questions = {}
    for question, texts in sorted(correct_responses.items()):
        vectors = np.empty((0, 0), dtype=np.float64)
        if len(texts) >= 2:
            vectors = np.asarray(embed(texts), dtype=np.float64)
            problem = _vector_problem(vectors, len(texts))
            if problem:
                raise DataError(f"diversity of {question}: {problem}; fix the embedding function")
        vectors_of_questions[question] = vectors
    return vectors_of_questions


def _vector_problem(vectors: np.ndarray, num_texts: int) -> str:
    """The reason why these are not the embeddings of `num_texts` texts; empty if they are."""
    if vectors.ndim != 2 or len(vectors) != num_texts:
        return f"embeddings have shape {vectors.shape}, expected ({num_texts}, dimension)"
    if not np.isfinite(vectors).all() or not np.linalg.norm(vectors, axis=1).all():
        return "an embedding is zero or not finite and has no direction"
    return ""


def question_scores(vectors: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The mean of 1 - cos over all pairs of a question's correct responses (equations 12 to 15).

    Args:
        vectors: question id -> float [correct responses, dimension].

    Returns:
        Question id -> score in [0, 2], without the questions with fewer than two correct responses.
    """
    scores = {}
    for question, embeddings in vectors.items():
        if not len(embeddings):
            continue
        directions = unit_rows(embeddings)
        pairs = np.triu_indices(len(directions), k=1)
        distances = 1.0 - (directions @ directions.T)[pairs]
        # Equal vectors have a cosine of 1 + rounding.
        scores[question] = max(float(np.mean(distances)), 0.0)
    return scores


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """The rows of float [rows, dimension], divided by their norms."""
    directions: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return directions


# -------------------------------------------------------------------------------- embedding models
def load_embedder(name: str) -> tuple[str, Embedder]:
    """An embedding model.

    Args:
        name: `hashed`, or a model in the format of sentence-transformers, folder or hub id. A
            vector is that library's, without its last normalisation.

    Returns:
        A description for outputs, and the function.

    Raises:
        ConfigError: the model cannot be used.
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
        model = AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
        model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        pooling, max_tokens = _pooling(name)
        limit = min(
            max_tokens,
            _MAX_TOKENS,
            tokenizer.model_max_length,
            model.config.max_position_embeddings,
        )
    # The library raises KeyError, SafetensorError, ... for damaged files.
    except Exception as error:
        reason = f"{type(error).__name__}: {shown(str(error), 200)}"
        raise ConfigError(
            f"--embedder {name}: {reason}; give the folder of an embedding model, or {HASHED}"
        ) from error

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches = []
        for start in range(0, len(texts), _BATCH):
            inputs = tokenizer(
                list(texts[start : start + _BATCH]),
                padding=True,
                truncation=True,
                max_length=limit,
                return_tensors="pt",
            ).to(model.device)
            with torch.inference_mode():
                states = model(**inputs).last_hidden_state.float()
            weights = _pooling_weights(inputs["attention_mask"], pooling)
            vectors = torch.einsum("bt,bth->bh", weights.float(), states)
            batches.append(vectors.cpu().numpy())
        return np.concatenate(batches)

    return f"{name}, pooling: {pooling}, at most {limit} tokens of a response", embed


def _pooling_weights(mask: Any, pooling: str) -> Any:
    """The weight of each token in the pooled vector.

    Args:
        mask: int [texts, tokens], 1 for a token and 0 for the padding at the end.
        pooling: `mean`, `cls` or `lasttoken`.

    Returns:
        [texts, tokens], bool or float.
    """
    import torch

    last = mask.sum(1, keepdim=True) - 1
    positions = torch.arange(mask.shape[1], device=mask.device)
    if pooling == "mean":
        return mask / (last + 1)
    if pooling == "cls":
        return positions.eq(0 * last)
    return positions.eq(last)


def _pooling(name: str) -> tuple[str, int]:
    """The pooling of a model, from the files of sentence-transformers.

    Returns:
        `mean`, `cls` or `lasttoken`, and the largest number of tokens.

    Raises:
        ValueError: another pooling, or a model with further layers.
    """
    from transformers.utils import cached_file

    modules = parse_json(read_text(Path(cached_file(name, "modules.json"))), "modules.json")
    layers = [module["type"].rpartition(".")[2] for module in modules]
    if layers not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"modules.json lists {layers}; expected Transformer, Pooling and perhaps Normalize"
        )

    modes = _pooling_modes(read_object(Path(cached_file(name, "1_Pooling/config.json"))))
    if modes not in [[pooling] for pooling in _POOLINGS]:
        raise ValueError(
            f"1_Pooling/config.json has pooling {modes}; expected mean, cls or lasttoken"
        )

    limit = _MAX_TOKENS
    with suppress(OSError):  # Qwen3-Embedding has no such file
        config = read_object(Path(cached_file(name, "sentence_bert_config.json")))
        limit = config.get("max_seq_length") or limit
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(
            f"sentence_bert_config.json has max_seq_length {limit}; expected a positive integer"
        )
    return modes[0], limit


def _pooling_modes(config: Mapping[str, Any]) -> Any:
    """The modes of 1_Pooling/config.json.

    New files have `pooling_mode`, a name or a list; older ones an option for each mode, such as
    `pooling_mode_mean_tokens: true`.
    """
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return [modes] if modes in _POOLINGS else modes
    names = []
    for key, value in config.items():
        if key.startswith("pooling_mode_") and value is True:
            mode = key.removeprefix("pooling_mode_")
            names.append(mode.removesuffix("_tokens").removesuffix("_token"))
    return names


def _hashed(texts: Sequence[str]) -> np.ndarray:
    """How often each n-gram of characters occurs: float [texts, _DIMENSIONS], by hash."""
    vectors = np.zeros((len(texts), _DIMENSIONS))
    for row, text in enumerate(texts):
        padded = text.ljust(_NGRAM)
        for start in range(len(padded) - _NGRAM + 1):
            ngram = padded[start : start + _NGRAM].encode("utf-8", "replace")
            vectors[row, zlib.crc32(ngram) % _DIMENSIONS] += 1
    return vectors


# -------------------------------------------------------------------------- samples of evaluations
@report_wait("for the embeddings of all correct responses")
def embedded(
    paths: Sequence[Path], embedder: str, benchmarks: Collection[str] = ()
) -> tuple[str, Vectors]:
    """The embeddings of the correct responses of evaluations.

    Args:
        paths: runs or folders of results.
        embedder: name of the embedding model.
        benchmarks: names; all by default.

    Returns:
        The description of the embedder, and the vectors.

    Raises:
        DataError: a path without an evaluation.
    """
    # A run and the folder of its evaluation are the same.
    check_distinct([_results_of(path).parent for path in paths])
    responses = {path: _correct_responses(path) for path in paths}
    for path, of_benchmarks in responses.items():
        missing = sorted(set(benchmarks) - set(of_benchmarks))
        if missing:
            raise DataError(
                f"{path} has no samples of {missing[0]}; its benchmarks: "
                f"{', '.join(sorted(of_benchmarks))}"
            )

    description, embed = load_embedder(embedder)  # a large model: after all other errors
    vectors = {}
    for path, of_benchmarks in responses.items():
        for benchmark, correct in sorted(of_benchmarks.items()):
            if not benchmarks or benchmark in benchmarks:
                vectors[f"{path} {benchmark}"] = question_vectors(correct, embed)
    return description, vectors


def _results_of(path: Path) -> Path:
    """results.json of a folder of results, else of a run."""
    results = path / "results.json"
    return results if is_file(results) else path / "eval" / "results.json"


def _correct_responses(path: Path) -> dict[str, dict[str, list[str]]]:
    """Benchmark -> question -> its correct responses.

    Raises DataError without an evaluation, or with a damaged one.
    """
    correct: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in _records(_samples_file(path)):
        # A question without a correct response is counted too.
        responses = correct[record["source"]][record["prompt_id"]]
        if record["label"] == 1:
            responses.append(record["response"])
    return correct


def _samples_file(path: Path) -> Path:
    """The samples that results.json names."""
    results = _results_of(path)
    if not is_file(results):
        raise DataError(
            f"{path}: no results.json; run `pacs-megatron eval` first, and give its folder or the "
            "run's"
        )
    name = read_object(results).get("samples")
    if isinstance(name, str) and Path(name).name == name:
        file = results.parent / name
        if file.is_file():
            return file
    raise DataError(
        f"{results}: samples={name!r} is no file of this folder; evaluate the run again"
    )


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, after its header."""
    samples = read_samples(file)
    _, header = next(samples, (b"", {}))
    if not has_fields(header, {"digest": str}):
        raise DataError(f"{file}:1 is no header of samples; evaluate the run again")

    ids: set[str] = set()
    for number, (_, record) in enumerate(samples, start=2):
        if not is_sample(record) or record["id"] in ids:
            raise DataError(
                f"{file}:{number} is no judged sample, or a repeated one; evaluate the run again"
            )
        ids.add(record["id"])
        yield record


# -------------------------------------------------------------------------------- files of vectors
def vectors_file(description: str, vectors: Vectors) -> bytes:
    """The content of an .npz file: one float32 array per question, and `embedder`."""
    arrays = {"embedder": np.array(description)}
    for name, questions in vectors.items():
        for question, embeddings in questions.items():
            arrays[f"{name}\t{question}"] = embeddings.astype("f4")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def load_vectors(paths: Sequence[Path]) -> tuple[str, Vectors]:
    """(embedder, vectors) of all `paths`, files of `vectors_file`.

    Raises DataError for a damaged one.
    """
    description = ""
    vectors: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as file:
                description = str(file["embedder"])
                # In the order of the file, so that methods have the same order in every process.
                for key in file.files:
                    if key == "embedder":
                        continue
                    name, _, question = key.partition("\t")
                    vectors[name][question] = file[key].astype("f8")
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}: no embeddings ({type(error).__name__}); remove it, and run it again"
            ) from error
    return description, {name: dict(sorted(item.items())) for name, item in vectors.items()}


# -------------------------------------------------------------------------------------------- page
def diversity_page(description: str, vectors: Vectors) -> tuple[list[str], str]:
    """(lines to print, the page)."""
    lines = [f"embedder: {description}"]
    points = {}
    for name, questions in vectors.items():
        scores = list(question_scores(questions).values())
        score = bootstrap_mean(scores)
        if score is None:
            text = "no question with two correct responses"
        else:
            interval = f"{score.value:.4f} [{score.low:.4f}, {score.high:.4f}]"
            text = f"{interval} over {len(scores)} questions"
            points[name] = np.concatenate([item for item in questions.values() if len(item)])
        num_without = len(questions) - len(scores)
        lines.append(f"{name}: {text}, {num_without} with fewer than two correct responses")

    paragraphs = "".join(f"<p>{safe_text(line)}</p>" for line in lines)
    card = f'<div class="card">{paragraphs}</div>'
    pictures = _pictures(points) if points else ""
    return lines, page("Diversity", f"<main><h1>Diversity</h1>{card}{pictures}</main>")


def _pictures(points: Mapping[str, np.ndarray]) -> str:
    """One density per model and benchmark, over the first two principal components of all
    embeddings together.
    """
    plane = _in_one_plane(points)
    low = np.min([xy.min(axis=0) for xy in plane.values()], axis=0)
    high = np.max([xy.max(axis=0) for xy in plane.values()], axis=0)
    span = np.maximum(high - low, 1e-9)

    figures = []
    for number, (name, xy) in enumerate(plane.items()):
        cells = _cells(_density((xy - low) / span), colour=f"dot s{number % NUM_COLOURS}")
        figures.append(
            f"<figure><figcaption><span>{safe_text(name)} <small>PCA, {len(xy)} correct "
            "responses</small></span></figcaption>"
            f'<svg viewBox="0 0 {_SIZE} {_SIZE}" role="img" '
            f'aria-label="density">{cells}</svg></figure>'
        )
    return (
        "<h2>Density over the first two principal components</h2>"
        f'<div class="charts">{"".join(figures)}</div>'
    )


def _in_one_plane(points: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The directions of all vectors, projected on their first two principal components.

    Args:
        points: name -> float [vectors, dimension].

    Returns:
        Name -> float [vectors, 2].
    """
    directions = {name: unit_rows(vectors) for name, vectors in points.items()}
    together = np.concatenate(list(directions.values()))
    centre = together.mean(axis=0)
    _, _, components = np.linalg.svd(together - centre, full_matrices=False)
    axes = components[:2]
    return {name: (vectors - centre) @ axes.T for name, vectors in directions.items()}


def _density(xy: np.ndarray) -> np.ndarray:
    """Smoothed histogram: float [_CELLS, _CELLS], by x and y.

    Args:
        xy: float [points, 2], in [0, 1].
    """
    x, y = xy.T
    margin = (-0.05, 1.05)
    density, _, _ = np.histogram2d(x, y, bins=_CELLS, range=(margin, margin))
    for axis in (0, 1):
        density = np.apply_along_axis(np.convolve, axis, density, _KERNEL, mode="same")
    smooth: np.ndarray = density
    return smooth


def _cells(density: np.ndarray, *, colour: str) -> str:
    """One rectangle per cell, with the density as opacity; the y axis points upwards."""
    side = _SIZE / _CELLS
    rectangles = []
    for (column, row), share in np.ndenumerate(density / density.max()):
        if share <= _MIN_SHARE:
            continue
        rectangles.append(
            f'<rect class="{colour}" x="{column * side:.1f}" y="{_SIZE - (row + 1) * side:.1f}" '
            f'width="{side:.1f}" height="{side:.1f}" opacity="{share:.2f}"/>'
        )
    return "".join(rectangles)
