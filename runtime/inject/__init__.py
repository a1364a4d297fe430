"""A folder for PYTHONPATH: Python runs the ``sitecustomize`` in it at start."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent
