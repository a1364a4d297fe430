"""Bounds of pages and terminal output, with unit and reason."""

from __future__ import annotations

MAX_DRAWN_RANKS = 128  # ranks that are all drawn; above, only those that stand out
CHART_WIDTH = 960.0  # of the drawing, px; scales with the page
LABEL_WIDTH = 118.0  # of the labels left of bars, px
LABEL_HEIGHT = 15.0  # between labels of marks, px
SHOWN_LIMIT = 3.0  # a limit this many times beyond all marks would crowd them into a corner; not drawn
MAX_MARKS = 5000  # marks of one chart; bounds the size of a page
NAMED_KINDS = 4  # kinds of work named in one line
SHOWN_KERNELS = 15  # kernels listed on a page; the JSON holds more
SHOWN_MODULES = 20  # modules listed on a page; the JSON holds more
MAX_COLLECTIVES = 60  # rows of the table of collectives
HTA_TEXT_ROWS = 8  # traces listed on a terminal; the report lists all
SHOWN_CANDIDATES = 8  # candidates listed on a terminal; the JSON holds all
SHOWN_OTHERS = 3  # likewise, of those that a plan may not choose
PAGE_CANDIDATES = 14  # candidates listed on a page; the JSON holds all
WORST_RANKS = 16  # slowest ranks drawn then
BEST_RANKS = 4  # fastest ranks drawn then
WIDE_RANGE = 1.5  # high over low from which a number is shown with its range; a reader's choice
LEAST_DRAWN = 1e-6  # us or bytes of a whole axis; below a picosecond only damage is left, and scales overflow
PRODUCTS_SHARE = 0.2  # of computing that products of known shape must take for their speed to be told; assumed
