"""What a process uses, measured from inside."""
