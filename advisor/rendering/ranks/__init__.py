"""How pages show the ranks of a run: all of a few; of thousands what stands out, host by host, and a map of all."""
