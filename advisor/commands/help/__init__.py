"""Verbs that explain the product and its installation."""
