"""Steps of a run as lanes of boxes: which ranks and steps are worth looking at, on one clock."""
