"""What a prediction advises: the decision, levers beside it, answers to questions."""
