"""Who holds up a hung job, from flight-recorder dumps, stacks, RAS reports and watchdog logs."""
