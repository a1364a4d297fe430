"""A script's model under a plan: how it is wrapped, what is asked of it, when it is switched."""
