"""From files to bounded, decompressed bytes, whatever is in them."""
