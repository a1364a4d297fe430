"""What a run measured, as the values that a replay takes."""
