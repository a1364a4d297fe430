"""One text for terminals per document."""
