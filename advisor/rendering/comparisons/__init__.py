"""A comparison as a page and as a notebook."""
