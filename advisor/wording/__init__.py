"""Numbers, codes and lines as people read them, and the streams that carry them."""
