"""Charts: what is drawn covers nothing that is meant."""

from __future__ import annotations

import re

from paro_advise.advisor.rendering.charts import Point, scatter
from paro_advise.advisor.rendering.constants import CHARACTER_WIDTH


def test_labels_of_the_chart_of_speed_against_memory_cover_no_mark():
    """Two labelled marks amid a crowd right of and below them."""
    crowd = [(bytes_, time) for bytes_ in range(10, 40, 2) for time in range(80, 100, 3)]
    points = [
        *(
            Point(kind="other", name="", label="", num_bytes=float(b), time_us=float(t), low_us=0.0, high_us=0.0)
            for b, t in crowd
        ),
        *(
            Point(
                kind=kind,
                name=kind,
                label=f"{kind}: a way to run",
                num_bytes=9.0,
                time_us=time,
                low_us=time,
                high_us=time,
            )
            for kind, time in (("now", 99.0), ("chosen", 82.0))
        ),
    ]
    text = str(scatter("c", "t", "d", points, memory="bytes"))
    marks = [tuple(map(float, found)) for found in re.findall(r'class="mark other" d="M([0-9.]+) ([0-9.]+)a4', text)]
    labels = re.findall(r'<text class="over" x="([0-9.]+)" y="([0-9.]+)" text-anchor="start">([^<]+)', text)
    assert len(marks) == len(crowd)
    assert len(labels) == 2
    for left, baseline, words in labels:
        x, y = float(left), float(baseline)
        covered = [
            (at + 4, height)
            for at, height in marks
            if x <= at + 4 <= x + CHARACTER_WIDTH * len(words) and y - 12 <= height <= y + 3
        ]
        assert covered == []
