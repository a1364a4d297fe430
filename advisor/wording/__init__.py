"""Numbers and codes as people read them."""
