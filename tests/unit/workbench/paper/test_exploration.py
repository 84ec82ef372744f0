"""Figure 5(b): panels, centres, densities and contours against their definitions."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from pacs_megatron.workbench.paper.exploration import (
    NUM_PANELS,
    centred_plane,
    contour,
    density,
    exploration_page,
    problems_of,
    sampled,
)

RUNS = {"pacs": [Path("/x/m-pacs-s0"), Path("/x/m-pacs-s1")], "grpo": [Path("/x/m-grpo-s0")]}


def vectors(num_problems: int = 9, offset: float = 5.0) -> dict[str, dict[str, np.ndarray]]:
    """Two seeds of PACS and one of GRPO; the last problem has two responses of GRPO."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, np.ndarray]] = {}
    for run, shift in (("m-pacs-s0", 0.0), ("m-pacs-s1", 0.0), ("m-grpo-s0", offset)):
        questions = {}
        for number in range(num_problems):
            count = 2 if run == "m-grpo-s0" and number == num_problems - 1 else 4
            questions[f"aime24/{number}"] = rng.normal(size=(count, 8)) + shift
        found[f"/x/{run} aime24"] = questions
    return found


def test_a_problem_needs_three_responses_of_each_method_and_seeds_are_pooled() -> None:
    problems = problems_of(RUNS, vectors())
    assert sorted(problems) == [f"aime24/{number}" for number in range(8)]
    assert {name: len(xy) for name, xy in problems["aime24/0"].items()} == {"pacs": 8, "grpo": 4}


def test_the_sample_is_the_same_each_time_and_depends_on_the_names_only() -> None:
    names = [f"aime24/{number}" for number in range(30)]
    assert len(sampled(names)) == NUM_PANELS
    assert sampled(names) == sampled(names[::-1]) and sampled(names) != names[:NUM_PANELS]


def test_each_method_is_centred_at_the_origin() -> None:
    """With the joint mean instead, two methods that lie apart would be apart."""
    points = problems_of(RUNS, vectors())["aime24/3"]
    plane = centred_plane(points)
    for xy in plane.values():
        np.testing.assert_allclose(xy.mean(axis=0), 0, atol=1e-12)

    # The axes maximise the variance of all centred points: an eigen-decomposition, by hand.
    rows = []
    for embeddings in points.values():
        unit = np.array([row / math.sqrt(sum(row**2)) for row in embeddings])
        rows.append(unit - np.array([sum(column) / len(unit) for column in unit.T]))
    together = np.vstack(rows)
    eigenvalues = np.linalg.eigvalsh(together.T @ together)
    drawn = np.vstack(list(plane.values()))
    np.testing.assert_allclose((drawn**2).sum(axis=0), eigenvalues[::-1][:2])


def test_the_density_is_a_gaussian_kernel_of_scotts_width() -> None:
    rng = np.random.default_rng(1)
    points = rng.normal(size=(20, 2)) * [1.0, 3.0]
    place = np.array([0.4, -1.0])
    total = 0.0
    for point in points:
        square = 0.0
        for axis in range(2):
            width = np.std(points[:, axis], ddof=1) * 20 ** (-1 / 6)
            square += ((place[axis] - point[axis]) / width) ** 2
        total += math.exp(-square / 2)
    assert density(points, place[None])[0] == pytest.approx(total / 20)
    assert np.isfinite(density(np.zeros((3, 2)), np.zeros((1, 2)))).all()


def test_the_contour_of_a_distance_is_a_circle() -> None:
    ticks = np.arange(41.0)
    values = -np.hypot(ticks[:, None] - 20, ticks[None, :] - 20)
    segments = contour(values, -12.3)
    ends = np.array(segments).reshape(-1, 2)
    np.testing.assert_allclose(np.hypot(*(ends - 20).T), 12.3, atol=0.02)
    # A closed line: every end belongs to two segments, and the lengths add up.
    _, counts = np.unique(ends.round(9), axis=0, return_counts=True)
    assert set(counts) == {2}
    length = sum(math.dist(*segment) for segment in segments)
    assert length == pytest.approx(2 * math.pi * 12.3, rel=0.01)


def test_a_saddle_has_two_lines() -> None:
    assert len(contour(np.array([[1.0, 0.0], [0.0, 1.0]]), 0.5)) == 2
    assert contour(np.zeros((3, 3)), 0.5) == []


def test_the_page_has_a_panel_a_problem_with_points_and_contours_of_both() -> None:
    text = exploration_page("Exploration <x>", "hashed", RUNS, vectors())
    panels = re.findall(r"<figure>.*?</figure>", text)
    assert len(panels) == NUM_PANELS == text.count("<svg")
    assert "6 of 8 problems" in text and "Exploration &lt;x&gt;" in text
    for panel in panels:
        assert panel.count('class="dot s0"') == 8 and panel.count('class="dot s1"') == 4
        for colour in ("s0", "s1"):
            paths = re.findall(rf'<path class="curve {colour}" d="([^"]+)"', panel)
            assert len(paths) == 2 and all(path.count("M") > 10 for path in paths)
        # The mean of a method's points is the middle of the panel.
        places = re.findall(r'class="dot s1" cx="([\d.]+)" cy="([\d.]+)"', panel)
        np.testing.assert_allclose(np.array(places, float).mean(axis=0), 190, atol=0.1)


def test_half_of_the_points_lie_inside_the_inner_contour() -> None:
    """The level of a contour is a quantile of the density at the points."""
    rng = np.random.default_rng(2)
    points = rng.normal(size=(400, 2))
    at_points = density(points, points)
    inside = at_points >= np.quantile(at_points, 0.5)
    radius = np.hypot(*points.T)
    assert inside.mean() == pytest.approx(0.5, abs=0.01)
    assert radius[inside].mean() < radius[~inside].mean()


def test_a_page_without_problems() -> None:
    text = exploration_page("none", "hashed", RUNS, vectors(num_problems=1))
    assert "0 of 0 problems" in text and "<figure" not in text
