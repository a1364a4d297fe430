"""Where ZeRO is."""
