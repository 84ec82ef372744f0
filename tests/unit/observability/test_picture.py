"""Charts as one SVG file."""

from xml.etree import ElementTree

from pacs_megatron.observability.charts import WIDTH, Chart, Series
from pacs_megatron.observability.picture import picture


def chart(title: str, *names: str) -> Chart:
    points = [(step, step / 10) for step in range(5)]
    return Chart(title=title, series=[Series(name=name, points=points) for name in names])


def test_panels_stand_side_by_side_over_one_legend() -> None:
    drawing = picture([chart("a < b", "x & y", "z"), chart("c", "x & y", "z")])
    root = ElementTree.fromstring(drawing)  # noqa: S314  (made here)
    texts = [element.text for element in root.iter() if element.text]
    assert {"a < b", "c"} <= set(texts)
    # Once, in the legend.
    assert texts.count("x & y") == texts.count("z") == 1
    assert root.attrib["viewBox"].split()[2] == str(2 * WIDTH)


def test_one_curve_needs_no_legend() -> None:
    assert ">only<" not in picture([chart("reward", "only")])
