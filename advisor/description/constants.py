"""What a description leaves open, with unit, origin and range; `docs/constants.md` lists them."""

from __future__ import annotations

# Bytes of a device's memory that Adam moves for a parameter: master and two moments read and written in fp32, the
# gradient read in fp32, the 16-bit parameter written
UPDATE_BYTES = 6 * 4.0 + 4.0 + 2.0
MEMORY_SHARE = 0.8  # of the memory's data sheet rate that Adam reaches; assumed, range 0.7 to 0.9

FLOP_PER_PARAMETER_AND_TOKEN = 6.0  # forward and backward (Kaplan et al. 2020, section 2.1); attention is not counted
# forward, and backward to what lies before them: 2 + 2; trained ones among the first layers need that of all others
FLOP_PER_FROZEN_PARAMETER_AND_TOKEN = 4.0

# How much longer a step takes for each unit of time that a collective runs beside backward: both share the device's
# memory and processors. `make bench-public`; range 1.4 to 1.6 (docs/scoreboard.md). Sigma: of the logarithm, assumed.
BESIDE_BACKWARD_SLOWING, BESIDE_BACKWARD_SIGMA = 1.5, 0.1

# Standard deviations of logarithms: of a rate that a benchmark elsewhere measured, and of one held beyond its most
# nodes for each doubling (`make bench-public`); of a network card's rate that people state.
LISTED_SIGMA, BEYOND_SIGMA, STATED_SIGMA = 0.15, 0.25, 0.2

UNSURE_ARITHMETIC = 1.5  # times its least that arithmetic may take for a step to tell little of it; assumed
