"""What every room speaks of: collectives, model states, frameworks, types, documents, capture files, secrets."""
