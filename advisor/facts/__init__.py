"""One rank's inputs reduced to facts: all that leaves the process which read them."""
