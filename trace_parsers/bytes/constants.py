"""Limits of reading bytes: ``NAME = value  # unit; meaning; origin``."""

from __future__ import annotations

READ_BYTES = 32 * 1024  # bytes; read from disk at once; assumed
HASH_BYTES = 1 << 20  # bytes; read at once where only the hash is wanted; assumed
OUTPUT_BYTES = 256 * 1024  # bytes; decompressed at once; assumed
# Traces at hand compress 10 to 20 times, extreme ones about 60; deflate's limit is 1032 (zlib.net, technical details).
MAX_RATIO = 250  # none; most that compressed input may expand; assumed between those
FREE_BYTES = 64 << 20  # bytes; output that is allowed whatever the ratio; assumed
MAX_OUTPUT_BYTES = 256 << 30  # bytes; most that one input may expand to; assumed
GZIP_WINDOW_BITS = 16 + 15  # none; gzip header and the largest window; zlib manual, inflateInit2
MAX_ZSTD_WINDOW = 1 << 27  # bytes; largest window of a zstd stream; default of the zstd command's decoder
MAX_HEADER_BYTES = 64 << 10  # bytes; longest name or attributes of an archive's member; assumed
MAX_MEMBERS = 4096  # files; most of one archive; assumed

FEW_IN_FRONT = 0.01  # of the events that begin otherwise, of which rows are that somebody put in front; assumed
ROWS_IN_FRONT = 8  # such rows, whatever follows them: names and places of a process or two; assumed
CHUNK_BYTES = 768 * 1024  # bytes; least text of events decoded at once; assumed
MAX_LEADING_BYTES = 4096  # bytes; most spaces before the array of events or inside its opening; assumed
MAX_PENDING_BYTES = 64 << 20  # bytes; most text held while no event boundary is found; assumed
MAX_FIRST_EVENT_BYTES = 4 << 20  # bytes; longest event that the boundary is learned from; assumed
MAX_KEY_BYTES = 16  # bytes; longest first key of an event with its quotes; assumed
MAX_LINE_BYTES = 1 << 20  # bytes; longest line of a log; assumed

MAX_PICKLE_BYTES = 256 << 20  # bytes; largest pickle; assumed
MAX_OPCODES = 10_000_000  # operations; most of one pickle; assumed

# SQLite counts steps of its virtual machine.
STEPS_PER_CALL = 100_000  # steps; between two looks at the budget; assumed
FREE_STEPS = 50_000_000  # steps; budget whatever the size of the file; assumed
STEPS_PER_BYTE = 8  # steps per byte; budget that grows with the file; assumed
MAX_CELL_TEXT = 4096  # bytes; longest text kept of one cell; assumed
MAX_CELL_BYTES = 64 << 20  # bytes; largest cell or row that SQLite may build; assumed
MAX_TABLES = 4096  # tables or columns; most that are listed; assumed
