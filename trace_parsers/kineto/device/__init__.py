"""What a device ran: its rows and its own steps."""
