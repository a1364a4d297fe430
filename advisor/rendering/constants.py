"""Bounds of pages and terminal output, with unit and reason."""

from __future__ import annotations

MAX_DRAWN_RANKS = 128  # ranks that are all drawn; above, only those that stand out
CHART_WIDTH = 960.0  # of the drawing, px; scales with the page
LABEL_WIDTH = 118.0  # of the labels left of bars, px
NARROW_LABEL = 22.0  # between labels that narrow screens, which draw them larger, do not let overlap, px
LABEL_HEIGHT = 15.0  # between labels of marks, px
CHARACTER_WIDTH = 6.5  # of a label of a mark, px; of 12 px system fonts, as browsers draw them
SHOWN_LIMIT = 3.0  # a limit this many times beyond all marks would crowd them into a corner; not drawn
PICTURE_NODES = 8  # nodes of a network picture; more are counted
PICTURE_RANKS = 16  # ranks drawn in a node, each 22 px wide
LANE_HEIGHT = 30.0  # of a lane of a timeline, px
TIME_UNITS = 50_000  # units in a timeline's whole length; a screen 1,000 px wide zooms in 50 times
MAX_MARKS = 5000  # marks of one chart; bounds the size of a page
NAMED_KINDS = 4  # kinds of work named in one line
SHOWN_KERNELS = 15  # kernels listed on a page; the JSON holds more
SHOWN_BOXES = 60  # collectives listed below a timeline
SHOWN_MODULES = 20  # modules listed on a page; the JSON holds more
MAX_COLLECTIVES = 60  # rows of the table of collectives
HTA_TEXT_ROWS = 8  # traces listed on a terminal; the report lists all
SHOWN_CANDIDATES = 8  # candidates listed on a terminal; the JSON holds all
SHOWN_OTHERS = 3  # likewise, of those that a plan may not choose
FIRST_CANDIDATES = 5  # of these that are shown before a reader asks for all
PAGE_CANDIDATES = 14  # candidates listed on a page; the JSON holds all
LEAST_MAPPED_RANKS = 64  # ranks from which a page has a map of them and a table of hosts; fewer are seen as bars
MAP_COLUMNS = 480  # columns of the map; of 10,000 ranks a column shows the slowest of 21
MAX_MAP_STEPS = 24  # rows of the map; a capture holds 3 to 10 steps as a rule
MAP_ROW = 22  # height of a row of the map, px
# Shares of a step by which a rank computes longer than the median rank, from which it is drawn darker; that of a
# straggler's threshold, and what a reader would call slow, very slow.
MAP_LEVELS = (0.02, 0.05, 0.1, 0.25)
SHOWN_HOSTS = 20  # hosts listed on a page, the slowest; the Parquet file beside it holds all ranks
OPENED_HOSTS = 12  # hosts of these whose ranks are listed too
SHOWN_INPUTS = 64  # inputs listed on a page; the JSON holds all
WORST_RANKS = 16  # slowest ranks drawn then
BEST_RANKS = 4  # fastest ranks drawn then
SHOWN_LINKS = 6  # links listed in the text of an analysis, those with the most collectives; page and JSON hold all
LEAST_TOGETHER = 0.02  # of exposed communication, from which it is said that states share it; a reader's choice
WIDE_RANGE = 1.5  # high over low from which a number is shown with its range; a reader's choice
LEAST_DRAWN = 1e-6  # us or bytes of a whole axis; below a picosecond only damage is left, and scales overflow
PRODUCTS_SHARE = 0.2  # of computing that products of known shape must take for their speed to be told; assumed
