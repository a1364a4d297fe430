"""What a process takes, measured from inside."""
