"""What every room speaks of: collectives, model states, element types, secrets."""
