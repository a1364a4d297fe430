"""What limits a run, state by state: from aligned ranks to findings and a verdict."""
