"""What every other module stands on: ownership, checks of arguments, deadlines."""
