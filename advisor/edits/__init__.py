"""Changes of a user's own files so that they run a plan: text in, text out, nothing else moved."""
