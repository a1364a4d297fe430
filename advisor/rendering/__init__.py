"""Finished values as pages, text, notebooks and charts; nothing is computed here."""
