"""A folder for PYTHONPATH: Python runs the ``sitecustomize`` in it at start."""
